"""When the faults of a configuration (group `fault`) happen to a device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetexp.core.config import FaultEvent

LASTING = ("slow", "thermal", "jitter")
"""Kinds that go on; the others happen once."""


@dataclass(frozen=True)
class Due:
    """An event that happens now."""

    kind: str
    seconds: float


class FaultSchedule:
    """The events of one device.

    Args:
        events: of the whole run.
        device_id: such as `emulated:0`, `cuda:1`.
        first: returns whether the event at this position has not happened yet. An event that ended the
            device's process then does not happen again to its replacement.
    """

    def __init__(
        self,
        events: Sequence[FaultEvent],
        device_id: str,
        first: Callable[[int], bool] = lambda position: True,
    ) -> None:
        local_events = [(place, event) for place, event in enumerate(events) if event.device == device_id]
        self.events = [event for _, event in local_events]
        """Events of this device."""
        self.lasting = [event for _, event in local_events if event.kind in LASTING]
        self._sudden = [(place, event) for place, event in local_events if event.kind not in LASTING]
        self._first = first
        self._begun = False

    def factor(self, step: int, elapsed_seconds: float) -> float:
        """Return how many times slower than usual the device is in this step (from 1 on)."""
        product = 1.0
        for event in self.lasting:
            since = _since(event, step, elapsed_seconds)
            if since < 0 or (event.until_step is not None and step >= event.until_step):
                continue
            if event.kind == "slow":
                product *= event.factor
            elif event.kind == "jitter":  # depends on the step alone, so that a run can be repeated
                product *= random.Random(f"{event.device}/{step}").uniform(1.0, event.factor)
            else:  # heats up towards the factor, two thirds of the way after `warm_up` steps (or seconds)
                product *= 1.0 + (event.factor - 1.0) * (1.0 - math.exp(-since / event.warm_up))
        return product

    def due(self, step: int, elapsed_seconds: float) -> list[Due]:
        """Return the events that happen now, each once.

        Events before the first requested step happened before a resume.
        """
        if not self._begun:
            self._begun = True
            self._sudden = [(p, e) for p, e in self._sudden if e.at_step is None or e.at_step >= step]
        now = [(place, event) for place, event in self._sudden if _since(event, step, elapsed_seconds) >= 0]
        self._sudden = [pair for pair in self._sudden if pair not in now]
        return [Due(event.kind, event.seconds) for place, event in now if self._first(place)]


def _since(event: FaultEvent, step: int, elapsed_seconds: float) -> float:
    if event.at_step is not None:
        return float(step - event.at_step)
    assert event.at_seconds is not None
    return elapsed_seconds - event.at_seconds

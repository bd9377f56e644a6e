"""Faults that a person orders (group `fault`): what happens to which device, and when."""

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
    """An event whose moment has come."""

    kind: str
    seconds: float


class FaultSchedule:
    """The events of one device.

    Args:
        events: of the whole run; those of other devices are left out.
        device_id: `emulated:0`, `cuda:1` …
        first: whether the event at this position is asked for the first time, so that one that ended the
            device's process does not happen again to the process that comes in its place.
    """

    def __init__(
        self,
        events: Sequence[FaultEvent],
        device_id: str,
        first: Callable[[int], bool] = lambda position: True,
    ) -> None:
        mine = [(place, event) for place, event in enumerate(events) if event.device == device_id]
        self.events = [event for _, event in mine]
        """Those of this device."""
        self.lasting = [event for _, event in mine if event.kind in LASTING]
        self._sudden = [(place, event) for place, event in mine if event.kind not in LASTING]
        self._first = first
        self._begun = False

    def factor(self, step: int, elapsed_seconds: float) -> float:
        """Return how many times slower than usual the device is in this step (from 1 on)."""
        product = 1.0
        for event in self.lasting:
            since = _since(event, step, elapsed_seconds)
            if since < 0:
                continue
            if event.until_step is not None and step >= event.until_step:
                continue
            if event.kind == "slow":
                product *= event.factor
            elif event.kind == "jitter":  # from the step alone, so that a run repeats
                product *= random.Random(f"{event.device}/{step}").uniform(1.0, event.factor)
            else:  # heats up towards the factor, two thirds of the way after `warm_up` steps (or seconds)
                product *= 1.0 + (event.factor - 1.0) * (1.0 - math.exp(-since / event.warm_up))
        return product

    def due(self, step: int, elapsed_seconds: float) -> list[Due]:
        """Return the events that happen now, each once.

        Those of steps before the first that is asked for happened before a resume.
        """
        if not self._begun:
            self._begun = True
            self._sudden = [one for one in self._sudden if one[1].at_step is None or one[1].at_step >= step]
        now = [one for one in self._sudden if _since(one[1], step, elapsed_seconds) >= 0]
        self._sudden = [one for one in self._sudden if one not in now]
        return [Due(event.kind, event.seconds) for place, event in now if self._first(place)]


def _since(event: FaultEvent, step: int, elapsed_seconds: float) -> float:
    if event.at_step is not None:
        return float(step - event.at_step)
    assert event.at_seconds is not None
    return elapsed_seconds - event.at_seconds

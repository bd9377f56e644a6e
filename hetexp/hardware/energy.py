"""What devices draw while they train, by counters that are read at the ends of each stretch of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetexp.core.device import DeviceSpec
from hetexp.hardware.detection.machine import Machine

if TYPE_CHECKING:
    from hetexp.hardware.backend import Backend

Counter = Callable[[], float | None]
"""Returns the joules that a device has drawn since some moment of its own, `None` where it does not tell."""
LONGEST_SECONDS = 60.0
"""Between two readings, where there are chances: Intel's drivers notice an overflow of their 32 bits only if
they are asked in time (minutes at full power: i915_hwmon.c, `hwm_energy`)."""
MOST_OF_LIMIT = 1.5
"""Mean power ÷ power limit above which a counter is not believed. Less than a second counts as one: a counter
moves a few times a second only."""


@dataclass
class _Account:
    """One device."""

    spec: DeviceSpec
    counter: Counter | None
    before: float | None = None
    joules: float = 0.0

    def begin(self) -> None:
        self.before = self._read()

    def go_on(self) -> None:
        """Add what was drawn since the last reading; a counter that fails or falls is asked no more."""
        now = self._read()
        if now is None or self.before is None or now < self.before:
            self.counter = None
            return
        self.joules += now - self.before
        self.before = now

    def _read(self) -> float | None:
        return self.counter() if self.counter is not None else None


class EnergyMeter:
    """Adds up what devices draw from each `start` to the next `stop`.

    Args:
        devices: their backends, in this rank's process.
        beside: all devices of the run. The counter of a card that several of them share is not used.
        machine: that they are in.
        clock: tells seconds.
    """

    def __init__(
        self,
        devices: Sequence[Backend],
        beside: Sequence[DeviceSpec] = (),
        machine: Machine | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._devices, self._machine, self._clock = devices, machine or Machine(), clock
        cards = [_card_of(spec) for spec in beside]
        self._shared = [cards.count(_card_of(device.spec)) > 1 for device in devices]
        self._accounts: list[_Account] | None = None
        self._open = ExitStack()
        self._runs = False
        self._seconds = self._read_at = 0.0

    def start(self) -> None:
        """Count from now on; the first time, counters are opened."""
        if self._runs:
            return
        if self._accounts is None:
            pairs = zip(self._devices, self._shared, strict=True)
            self._accounts = [_Account(one.spec, self._counter(one, shared)) for one, shared in pairs]
        self._runs, self._read_at = True, self._clock()
        for account in self._accounts:
            account.begin()

    def stop(self) -> None:
        """Count no longer; safe to call twice."""
        if self._runs:
            self._read()
            self._runs = False

    def keep_up(self) -> None:
        """Read the counters where the last reading is long ago."""
        if self._runs and self._clock() - self._read_at >= LONGEST_SECONDS:
            self._read()

    def joules(self) -> list[float | None]:
        """Stop, close the counters, and return what each device drew.

        `None` where it has no counter that can be believed: one that failed, fell, stood still, or showed
        more than the card may draw.
        """
        self.stop()
        self._open.close()
        return [self._told(account) for account in self._accounts or ()] or [None] * len(self._devices)

    def _counter(self, device: Backend, shared: bool) -> Counter | None:
        return None if shared else self._open.enter_context(device.energy_counter(self._machine))

    def _read(self) -> None:
        now = self._clock()
        self._seconds += now - self._read_at
        self._read_at = now
        for account in self._accounts or ():
            account.go_on()

    def _told(self, account: _Account) -> float | None:
        if account.counter is None or account.joules <= 0:
            return None
        limit, modelled = account.spec.power_limit_watts, account.spec.backend == "emulated"
        most = MOST_OF_LIMIT * (limit or math.inf) * max(self._seconds, 1.0)
        # A modelled device's seconds are not those of this clock.
        return account.joules if modelled or account.joules <= most else None


def _card_of(spec: DeviceSpec) -> str:
    """Return what tells a card from others; two ranks may share one."""
    return spec.uuid or spec.pci or spec.id

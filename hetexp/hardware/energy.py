"""Measures the energy of devices while they train, by counters read before and after each stretch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hetexp.core.device import DeviceSpec
from hetexp.hardware.base import Backend, Counter
from hetexp.hardware.detection.machine import Machine

LONGEST_SECONDS = 60.0
"""Longest time between two readings, if `keep_up` is called. Intel's drivers notice an overflow of their 32
bits only if they are read in time (minutes at full power: i915_hwmon.c, `hwm_energy`)."""


@dataclass
class _Account:
    """The energy of one device."""

    device: Backend
    counter: Counter | None
    before: float | None = None
    joules: float = 0.0

    def begin(self) -> None:
        self.before = self._read()

    def go_on(self) -> None:
        """Add the energy since the last reading; a counter that fails or falls is not read again."""
        now = self._read()
        if now is None or self.before is None or now < self.before:
            self.counter = None
            return
        self.joules += now - self.before
        self.before = now

    def total(self, seconds: float) -> float | None:
        """Return the joules of these seconds, `None` if they are not plausible."""
        counted = self.counter is not None and self.joules > 0
        return self.joules if counted and self.device.energy_is_plausible(self.joules, seconds) else None

    def _read(self) -> float | None:
        return self.counter() if self.counter is not None else None


class EnergyMeter:
    """Adds up the energy that devices draw from each `start` to the next `stop`.

    Args:
        devices: backends of the devices, in this rank's process.
        beside: all devices of the run. The counter of a card that several of them share is not used.
        machine: machine of the devices.
        clock: returns seconds.
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
        """Start counting; the first call opens the counters."""
        if self._runs:
            return
        if self._accounts is None:
            self._accounts = []
            for device, shared in zip(self._devices, self._shared, strict=True):
                counter = device.energy_counter(self._machine)
                self._accounts.append(_Account(device, None if shared else self._open.enter_context(counter)))
        self._runs, self._read_at = True, self._clock()
        for account in self._accounts:
            account.begin()

    def stop(self) -> None:
        """Stop counting; a second call does nothing."""
        if self._runs:
            self._read()
            self._runs = False

    def keep_up(self) -> None:
        """Read the counters if the last reading is long ago."""
        if self._runs and self._clock() - self._read_at >= LONGEST_SECONDS:
            self._read()

    def joules(self) -> list[float | None]:
        """Stop, close the counters, and return each device's energy.

        `None` if a device has no valid counter: it failed, fell, stood still, or showed more than the card
        may draw.
        """
        self.stop()
        self._open.close()
        if not self._accounts:
            return [None] * len(self._devices)
        return [account.total(self._seconds) for account in self._accounts]

    def _read(self) -> None:
        now = self._clock()
        self._seconds += now - self._read_at
        self._read_at = now
        for account in self._accounts or ():
            account.go_on()


def _card_of(spec: DeviceSpec) -> str:
    """Return the identity of a device's card; two ranks may share a card."""
    return spec.uuid or spec.pci or spec.id

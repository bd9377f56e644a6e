"""The processor as a device: how busy its cores are, and the host's memory."""

from __future__ import annotations

import os
from dataclasses import replace

from hetexp.core.device import DeviceSpec
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.backends.sysfs import host_memory
from hetexp.hardware.detection.machine import Machine
from hetexp.monitor.sample import Device, Sample, User


class Processor:
    """This machine's processor: the cores that this process may use."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.spec: DeviceSpec = replace(CpuBackend.describe(0), id="cpu")
        self.device = Device.of(self.spec)
        self._before = self._times()

    def sample(self, users: tuple[User, ...]) -> Sample:
        """Return a sample; its utilisation is that since the last call."""
        before, self._before = self._before, self._times()
        total, free = host_memory(self._machine)
        return Sample(
            self.device,
            utilisation=_busy(before, self._before),
            memory_used_bytes=total - free if total is not None and free is not None else None,
            memory_total_bytes=total,
            users=users,
        )

    def _times(self) -> tuple[int, int] | None:
        """Return the idle ticks and all ticks of the cores, as Linux counts them."""
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        idle = total = 0
        for line in (self._machine.text("/proc/stat") or "").splitlines():
            name, *words = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in allowed:
                ticks = [int(word) for word in words[:8]]  # these include the ticks of guests
                idle += ticks[3] + ticks[4]
                total += sum(ticks)
        return (idle, total) if total else None


def _busy(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    if before is None or now is None or now[1] <= before[1]:
        return None
    return max(0.0, min(1.0, 1 - (now[0] - before[0]) / (now[1] - before[1])))

"""Estimates of the speed of a plan's devices before it runs, and their sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.device import DeviceSpec

MEASURED, CATALOGUE, NOTHING = "measured", "from the catalogue", "not known"


@dataclass(frozen=True)
class DeviceEstimates:
    """The estimates of a plan's devices, with an entry for each device."""

    devices: tuple[DeviceCalibration | None, ...]
    """`None` for a device that neither a measurement nor the catalogue knows."""
    sources: tuple[str, ...]
    """`MEASURED`, `CATALOGUE` or `NOTHING`."""
    linked: tuple[DeviceSpec, ...]
    """The devices with their links: a real card of the catalogue has the catalogue's link to its host."""
    exchange: Exchange
    reason: str | None = None
    """Why a device is not known, if there is a special reason."""

    @classmethod
    def measured(
        cls, specs: Sequence[DeviceSpec], devices: Sequence[DeviceCalibration], exchange: Exchange
    ) -> DeviceEstimates:
        """Return the estimates by a calibration of exactly these devices."""
        return cls(tuple(devices), (MEASURED,) * len(devices), tuple(specs), exchange)

    @property
    def complete(self) -> bool:
        """Whether all devices are known."""
        return None not in self.devices

    def limited(self, caps: Sequence[int | None], sizes: Sequence[int | None]) -> DeviceEstimates:
        """Return the estimates with limits to each device's samples of a step, and of a microbatch."""
        limits = zip(self.devices, caps, sizes, strict=True)
        devices = [device and device.capped(cap).split_microbatches(size) for device, cap, size in limits]
        return replace(self, devices=tuple(devices))

    def mixed(self, kept: Sequence[int | None], old: DeviceEstimates) -> DeviceEstimates:
        """Return the estimates with the measurements of devices that are also in `old`.

        With such devices the exchange is that of `old`, too.

        Args:
            kept: each device's place in `old`; `None` for a new device.
        """
        places = [p if p is not None and old.sources[p] == MEASURED else None for p in kept]
        if all(place is None for place in places):
            return self
        devices, sources = list(self.devices), list(self.sources)
        for at, place in enumerate(places):
            if place is not None:
                devices[at], sources[at] = old.devices[place], MEASURED
        return replace(self, devices=tuple(devices), sources=tuple(sources), exchange=old.exchange)

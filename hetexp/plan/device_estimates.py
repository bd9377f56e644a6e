"""What is known of a plan's devices before it runs, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.device import DeviceSpec

MEASURED, CATALOGUE, NOTHING = "measured", "from the catalogue", "not known"


@dataclass(frozen=True)
class DeviceEstimates:
    """One entry a device."""

    devices: tuple[DeviceCalibration | None, ...]
    """`None` where neither a measurement nor the catalogue says anything."""
    sources: tuple[str, ...]
    linked: tuple[DeviceSpec, ...]
    """The devices as links see them: a real card of the catalogue has the catalogue's link to its host."""
    exchange: Exchange
    reason: str | None = None
    """Why nothing is known, where there is more to say than that."""

    @classmethod
    def measured(
        cls, specs: Sequence[DeviceSpec], devices: Sequence[DeviceCalibration], exchange: Exchange
    ) -> DeviceEstimates:
        """Return what a calibration of these very devices tells."""
        return cls(tuple(devices), (MEASURED,) * len(devices), tuple(specs), exchange)

    @property
    def complete(self) -> bool:
        return None not in self.devices

    def limited(self, caps: Sequence[int | None], passes: Sequence[int | None]) -> DeviceEstimates:
        """Return the same with further limits to the samples of a step, and to those of a pass."""
        limits = zip(self.devices, caps, passes, strict=True)
        devices = [one.capped(cap).split_microbatches(size) if one else None for one, cap, size in limits]
        return replace(self, devices=tuple(devices))

    def mixed(self, kept: Sequence[int | None], old: DeviceEstimates) -> DeviceEstimates:
        """Return what is known of other devices, of which some are among those of `old`.

        What was measured of them stays true, and so does the exchange that was measured with them.

        Args:
            kept: of each device its place in `old`, `None` for one that is new.
        """
        places = [p if p is not None and old.sources[p] == MEASURED else None for p in kept]
        if all(place is None for place in places):
            return self
        return replace(
            self,
            devices=tuple(
                old.devices[p] if p is not None else one for p, one in zip(places, self.devices, strict=True)
            ),
            sources=tuple(
                MEASURED if p is not None else s for p, s in zip(places, self.sources, strict=True)
            ),
            exchange=old.exchange,
        )

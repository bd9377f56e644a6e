"""Shares by the catalogue's peak rates, before any measurement."""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.split import normalise


class Tflops(BalancingPolicy):
    """Gives each device a share in proportion to its peak rate in its precision."""

    def shares(self, devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
        rates = [known_rate(device, precision) for device, precision in zip(devices, precisions, strict=True)]
        unknown = [str(device) for device, rate in zip(devices, rates, strict=True) if rate is None]
        if unknown:
            raise ConfigError(
                f"`balancing` tflops must find every device in the catalogue, but does not know "
                f"{', '.join(unknown)}. Add the card to a file of your own (hardware.catalogue), or measure "
                "it (balancing=profiled)."
            )
        return normalise([rate or 0.0 for rate in rates])


def known_rate(device: DeviceSpec, precision: str) -> float | None:
    """Return a device's peak rate in TFLOP/s from the catalogue; `None` if it has none."""
    return (device.rates or {}).get(precision)


def assumed_shares(devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
    """Return the shares by the catalogue's rates; equal shares if it does not know all devices."""
    rates = [known_rate(device, precision) for device, precision in zip(devices, precisions, strict=True)]
    known = [rate for rate in rates if rate is not None]
    return normalise(known if len(known) == len(devices) else [1.0] * len(devices))

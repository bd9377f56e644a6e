"""Shares by memory: the rule of thumb of people who have more cards than measurements.

    memory / 8 GiB × a factor for the vendor, 1.0 NVIDIA, 0.8 AMD, 0.5 others

A card's speed is not in it: a large slow card gets much work.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.split import normalise

UNIT_BYTES = 8 * GIB
FACTORS = {"nvidia": 1.0, "amd": 0.8}
OTHER_FACTOR = 0.5
RESERVE = 0.1
"""Of a device's memory, left to drivers and to what grows."""
UNIFIED = 0.5
"""Part of a memory shared with the host that counts as the device's."""


class Vram(BalancingPolicy):
    """Gives each device a part in proportion to the memory that is free on it, weighted by vendor."""

    def shares(self, devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
        usable = [usable_bytes(device) for device in devices]
        unknown = [str(device) for device, size in zip(devices, usable, strict=True) if not size]
        if unknown:
            raise ConfigError(
                f"`balancing` vram must know every device's memory, but nothing is free or known on "
                f"{', '.join(unknown)}. Say how much may be used (`memory_gib` beside the device)."
            )
        return normalise(
            [
                (size or 0) / UNIT_BYTES * FACTORS.get(device.vendor, OTHER_FACTOR)
                for device, size in zip(devices, usable, strict=True)
            ]
        )


def usable_bytes(device: DeviceSpec) -> int | None:
    """Return what a run may use of a device's memory, `None` where its size is not known."""
    total = device.memory_bytes
    if not total:
        return None
    there = int(total * UNIFIED) if device.unified_memory else total
    free = (
        there if device.memory_free_bytes is None or device.limited else min(there, device.memory_free_bytes)
    )
    return max(0, free - int(RESERVE * there))

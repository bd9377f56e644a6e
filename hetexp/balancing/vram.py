"""Shares by memory, a rule of thumb without measurements.

    memory / 8 GiB × a factor for the vendor, 1.0 NVIDIA, 0.8 AMD, 0.5 others

It ignores the speed, so that a slow card with much memory gets much work.
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
"""Fraction of a device's memory for drivers and for growth."""
UNIFIED = 0.5
"""Fraction of memory shared with the host that counts as the device's."""


class Vram(BalancingPolicy):
    """Gives each device a share in proportion to its free memory, weighted by vendor."""

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
    """Return the part of a device's memory that a run may use; `None` if its size is not known."""
    if not device.memory_bytes:
        return None
    total = int(device.memory_bytes * UNIFIED) if device.unified_memory else device.memory_bytes
    free = total
    if device.memory_free_bytes is not None and not device.limited:
        free = min(total, device.memory_free_bytes)
    return max(0, free - int(RESERVE * total))

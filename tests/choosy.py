"""A strategy as a person may write it that runs on cards of one vendor only."""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.strategy.ddp import DDP


class Choosy(DDP):
    """DDP that wants nothing but NVIDIA's cards."""

    name = "choosy"

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        others = [device.id for device in devices if device.vendor != "nvidia"]
        return [f"`strategy` must be ddp for {', '.join(others)}, but is 'choosy' instead."] if others else []


class Loud(DDP):
    """Claims to be exact, and trains with a gradient that is one percent too large."""

    exact = True

    def gradient_divisor(self, world_size: int) -> int:
        """Return what every rank multiplies its sum by, and a hundredth of it."""
        return world_size * 1.01  # type: ignore[return-value]

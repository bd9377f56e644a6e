"""One device, the whole batch: the reference that every other strategy is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.strategy.unexchanged import Unexchanged

if TYPE_CHECKING:
    from torch import nn

    from hetexp.training.engine import Engine


class Single(Unexchanged):
    """Trains on one device and exchanges nothing."""

    name: ClassVar[str] = "single"
    solo = True
    compiles = True
    predicted_as = "alone"

    def engine(self) -> Engine:
        from hetexp.training.data_parallel import Alone

        return Alone()

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        if len(devices) == 1:
            return []
        names = ", ".join(device.id for device in devices)
        return [
            f"`strategy` must be ddp for {len(devices)} devices ({names}), but is 'single' instead. Or "
            f"choose one of them: 'hardware.devices=[{devices[0].id}]'."
        ]

    def exchanged_bytes(self, model: nn.Module, world_size: int) -> int | None:
        return 0

"""One device that trains on the whole batch: the reference of every other strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.strategy.unexchanged import Unexchanged

if TYPE_CHECKING:
    from torch import nn

    from hetexp.training.engine import Engine


class Single(Unexchanged):
    """Trains on one device and exchanges nothing."""

    name: ClassVar[str] = "single"
    exact = True
    compiles = True

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

    def check_candidate(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        return []  # the fastest of the devices is enough

    def check_script(self) -> list[str]:
        return [] if type(self) is Single else super().check_script()  # a subclass may want a loop of its own

    def fallback_hint(self) -> str:
        return ""  # to choose one device is what its problem says

    def fallback_from(self, reason: str) -> dict[str, str] | None:
        return None

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        return [inputs.alone()]

    def all_reduces(self) -> bool:
        return False

    def exchanged_bytes(self, model: nn.Module, world_size: int) -> int | None:
        return 0

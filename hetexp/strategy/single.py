"""One device, the whole batch: the reference that every other strategy is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.strategy.base import Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.comm.communicator import Communicator
    from hetexp.strategy.empty_share import EmptyShareGuard


class Single(Strategy):
    """Trains on one device and exchanges nothing."""

    name: ClassVar[str] = "single"
    solo = True
    compiles = True
    predicted_as = "alone"

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        if len(devices) == 1:
            return []
        names = ", ".join(device.id for device in devices)
        return [
            f"`strategy` must be ddp for {len(devices)} devices ({names}), but is 'single' instead. Or "
            f"choose one of them: 'hardware.devices=[{devices[0].id}]'."
        ]

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        from hetexp.strategy.empty_share import EmptyShareGuard

        return EmptyShareGuard(model)

    def join(
        self,
        module: nn.Module,
        communicator: Communicator,
        inputs: Any,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Let running statistics see a batch once, also where its activations are computed again."""
        from hetexp.model.recompute import recomputes
        from hetexp.strategy.batch_norm import SynchronisedNorms, batch_norms
        from hetexp.strategy.empty_share import EmptyShareGuard

        assert isinstance(module, EmptyShareGuard)
        model: nn.Module = getattr(module.model, "_orig_mod", module.model)
        if recomputes(model) and batch_norms(model):
            module.norms = SynchronisedNorms(model, communicator)
            module.norms.record(inputs)

    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def guard(self, module: nn.Module) -> EmptyShareGuard | None:
        from hetexp.strategy.empty_share import EmptyShareGuard

        assert isinstance(module, EmptyShareGuard)
        return module

    def averaged_over(self, world_size: int) -> int:
        return 1

    def exchanged_bytes(self, model: nn.Module, world_size: int) -> int | None:
        return 0

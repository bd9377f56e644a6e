"""The base of strategies whose backward passes exchange nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hetexp.plan.strategy import Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.comm.communicator import Communicator
    from hetexp.comm.empty_share import EmptyShareGuard


class Unexchanged(Strategy):
    """A strategy without an exchange of gradients during backward."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        from hetexp.comm.empty_share import EmptyShareGuard

        return EmptyShareGuard(model)

    def attach_group(
        self,
        module: nn.Module,
        communicator: Communicator,
        inputs: Any,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Update running statistics once a batch, also if its activations are computed again."""
        from hetexp.comm.communicator import SoloCommunicator
        from hetexp.comm.empty_share import EmptyShareGuard
        from hetexp.model.recompute import recomputes
        from hetexp.strategy.batch_norm import SynchronisedNorms, batch_norms

        assert isinstance(module, EmptyShareGuard)
        model = module.bare_model
        if recomputes(model) and batch_norms(model):
            module.norms = SynchronisedNorms(model, SoloCommunicator())
            module.norms.record(inputs)

    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def guard(self, module: nn.Module) -> EmptyShareGuard | None:
        from hetexp.comm.empty_share import EmptyShareGuard

        assert isinstance(module, EmptyShareGuard)
        return module

    def gradient_divisor(self, world_size: int) -> int:
        return 1

"""A rank without samples still takes part in the exchange, with gradients of zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetexp.core.call import call_model


class _Zero(torch.autograd.Function):
    """A scalar 0 that depends on a parameter, and on the zero before it, and sends a gradient of zero.

    Multiplying a real output by zero would not do: 0 × inf is NaN, and some layers refuse an empty batch.
    """

    @staticmethod
    def forward(ctx: Any, before: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        return gradients[0] if ctx.needs_input_grad[0] else None, torch.zeros_like(ctx.saved_tensors[0])


class EmptyShareGuard(nn.Module):
    """Calls the model with inputs, or without any returns a zero that is connected to every parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        if inputs is None:
            # A chain, so that gradients come in the order of a real backward: DDP takes rank 0's for all.
            zero: torch.Tensor | None = None
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    zero = _Zero.apply(zero, parameter)  # type: ignore[no-untyped-call]
            return zero
        return call_model(self.model, inputs)

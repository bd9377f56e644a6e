"""A rank without samples still takes part in the exchange, with gradients of zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetexp.core.call import call_model


class _Zero(torch.autograd.Function):
    """A scalar 0 that depends on all parameters and sends each of them a gradient of zero.

    Multiplying a real output by zero would not do: 0 × inf is NaN, and some layers refuse an empty batch.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class EmptyShareGuard(nn.Module):
    """Calls the model with inputs, or without any returns a zero that is connected to every parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        if inputs is None:
            zero: torch.Tensor = _Zero.apply(  # type: ignore[no-untyped-call]
                *(p for p in self.model.parameters() if p.requires_grad)
            )
            return zero
        return call_model(self.model, inputs)

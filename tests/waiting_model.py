"""A model whose work is known beforehand: it waits, longer on one rank than on the other."""

from __future__ import annotations

import time
from typing import Any

import torch
from faulty import my_rank
from torch import nn


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, before: float, after: float) -> torch.Tensor:
        ctx.after = after
        time.sleep(before)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        time.sleep(ctx.after)
        return gradients[0], None, None


class Waiting(nn.Module):
    """A linear model; each sample takes its time backward, on rank 1 so many times as long.

    Args:
        slower: by this factor.
        per_sample: seconds on rank 0.
        first: seconds that the first pass of rank 0 takes besides.
    """

    def __init__(self, slower: float, per_sample: float = 1e-3, first: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.per_sample = per_sample * (slower if my_rank() == 1 else 1.0)
        self.before = first if my_rank() == 0 else 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        before, self.before = self.before, 0.0
        output: torch.Tensor = self.linear(inputs)
        waited: torch.Tensor = _Wait.apply(output, before, self.per_sample * len(inputs))  # type: ignore[no-untyped-call]
        return waited

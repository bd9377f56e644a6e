"""A model as a person may have it by mistake: one rank changes a weight on its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from faulty import my_rank

from hetexp.model.mlp import MLP


class Net(MLP):
    """A perceptron with one hidden layer; rank 1 moves one of its weights in its third training pass.

    Args:
        by: how far.
    """

    def __init__(
        self, by: float = 0.01, input_shape: Sequence[int] | None = None, num_classes: int | None = None
    ) -> None:
        super().__init__((16,), input_shape, num_classes)
        self.by, self.passes = by if my_rank() == 1 else 0.0, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.training and self.passes == 3:
            with torch.no_grad():
                next(self.parameters())[0, 0] += self.by
        return super().forward(inputs)

"""A model as a person may write it, whose gradient is no number at chosen passes, and that keeps a diary."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from faulty import my_rank

from hetexp.model.mlp import MLP


class Net(MLP):
    """A perceptron with one hidden layer.

    Args:
        passes: training passes, from 0, at which the gradient bursts on `bad_rank`.
        loss_too: whether the output is no number, either.
        diary: folder in which every rank notes what its weights were at each pass.
    """

    def __init__(
        self,
        passes: Sequence[int] = (),
        bad_rank: int = 1,
        loss_too: bool = False,
        diary: str | None = None,
        input_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
    ) -> None:
        super().__init__((16,), input_shape, num_classes)
        rank = my_rank()
        self.passes = passes if rank == bad_rank else ()
        self.loss_too, self.seen = loss_too, 0
        self.diary = Path(diary) / f"{rank}.txt" if diary is not None else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.diary is not None and inputs.dtype is torch.float32:
            weights = b"".join(p.detach().cpu().numpy().tobytes() for p in self.parameters())
            with self.diary.open("a") as file:
                file.write(
                    f"{'train' if self.training else 'eval'} {hashlib.sha256(weights).hexdigest()[:12]}\n"
                )
        output = super().forward(inputs)
        if self.training and torch.is_grad_enabled():  # a look for the samples is no training pass
            if self.seen in self.passes:
                if self.loss_too:
                    output = output * float("nan")
                else:
                    output.register_hook(lambda gradient: gradient * float("inf"))
            self.seen += 1
        return output

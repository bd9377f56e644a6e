"""Data as a person may have it, with samples that are no numbers, and a model that some are bad for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Data:
    """Four numbers a sample and two classes; also the evaluation's.

    Args:
        bad: places of the samples whose values are no numbers.
        zero: places of the samples whose values are all 0.
    """

    facts = {"input_shape": [4], "num_classes": 2}

    def __init__(self, bad: Sequence[int] = (), zero: Sequence[int] = ()) -> None:
        self.values = dict.fromkeys(bad, float("nan")) | dict.fromkeys(zero, 0.0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        value = self.values.get(index, 1.0)
        return torch.randn(4, generator=generator) * value, torch.tensor(index % 2)


class Root(nn.Module):
    """Takes a square root, whose gradient at 0 is infinite while its value is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(inputs).abs().sqrt())
        return output


class Normed(nn.Sequential):
    """Has a BatchNorm, by which one rank's sample is every rank's."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

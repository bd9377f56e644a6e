"""Data as a person may have it, with samples that are no numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Data:
    """Four numbers a sample and two classes; also the evaluation's.

    Args:
        bad: places of the samples whose values are no numbers.
    """

    facts = {"input_shape": [4], "num_classes": 2}

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad = set(bad)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        value = float("nan") if index in self.bad else 1.0
        return torch.randn(4, generator=generator) * value, torch.tensor(index % 2)

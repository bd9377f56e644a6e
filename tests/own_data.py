"""Data whose contents may differ between ranks and between runs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset


def rows(count: int, seed: int = 0) -> TensorDataset:
    """Return vectors of 8 numbers in float64, and a class of 3."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(dim=1))


class Rows:
    """Training and evaluation data."""

    facts = {"input_shape": [8], "num_classes": 3}

    def __init__(self, count: int = 96, evaluation: int = 30, seed: int = 0) -> None:
        self.train = rows(count, seed)
        self.evaluation = rows(evaluation, seed + 1) if evaluation else None


class OwnSplit(Rows):
    """A split by a generator without a seed: every rank has another one (case 68)."""

    def __init__(self, count: int = 96) -> None:
        super().__init__(count)
        order = np.random.default_rng().permutation(count).tolist()
        whole = self.train
        self.train, self.evaluation = Subset(whole, order[:64]), Subset(whole, order[64:])  # type: ignore


class Noisy(Dataset[Any]):
    """Samples with random numbers: of the process's generators, or of one without a seed."""

    facts = Rows.facts

    def __init__(self, unseeded: bool = False, count: int = 48) -> None:
        self._rows, self._own = rows(count), np.random.default_rng() if unseeded else None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self._rows[index]
        if self._own is not None:
            return x + self._own.normal(), y
        return x + random.gauss(0, 1) + np.random.randn() + torch.randn(1, dtype=torch.float64), y

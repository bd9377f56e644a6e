"""Token rows of unequal length, padded at their end as far as the rows they come with need it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from hetexp.data.in_memory import InMemory

IGNORED = -100
"""Target that does not count: torch's own default, and the framework's (`hetexp.training.loss`)."""
Row = tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", "np.ndarray[tuple[int], np.dtype[np.int64]]"]
"""Tokens, and for each the one to predict or `IGNORED`."""


class PaddedRows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is (tokens [seq], targets [seq]), int64; seq is that of the longest asked for at once.

    Rows asked for one by one are all as long as the longest.

    Args:
        longest: length of the longest row there is, maybe elsewhere.
        padding: token that stands behind a row's end; its target is ignored.
    """

    prefetchable = True

    def __init__(self, rows: Sequence[Row], longest: int, padding: int) -> None:
        self._rows, self._longest, self._padding = list(rows), longest, padding

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._padded(index, self._longest)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        length = max((len(self._rows[index][0]) for index in indices), default=0)
        return [self._padded(index, length) for index in indices]

    def same_shape(self) -> InMemory:
        """Return the same samples, all as long as the longest."""
        samples = [self[index] for index in range(len(self))]
        return InMemory(*(torch.stack(column) for column in zip(*samples, strict=True)))

    def num_counted(self, index: int) -> int:
        """Return how many targets of a row count."""
        return int(np.count_nonzero(self._rows[index][1] != IGNORED))

    def _padded(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = self._rows[index]
        inputs = torch.full((length,), self._padding, dtype=torch.int64)
        wanted = torch.full((length,), IGNORED, dtype=torch.int64)
        inputs[: len(tokens)], wanted[: len(tokens)] = torch.from_numpy(tokens), torch.from_numpy(targets)
        return inputs, wanted

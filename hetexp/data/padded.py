"""Token rows of unequal length, padded at their end to the longest row of a call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from hetexp.data.in_memory import InMemory

IGNORED = -100
"""Target that does not count, by default in torch and in `hetexp.training.loss`."""
Row = tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", "np.ndarray[tuple[int], np.dtype[np.int64]]"]
"""Tokens, and for each the token to predict or `IGNORED`."""


class PaddedRows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is (tokens [seq], targets [seq]), int64; seq is the length of the longest row of the call.

    A single row has the length of the longest row of all.

    Args:
        longest: length of the longest row, also of other data.
        padding: token after a row's end; its target is ignored.
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
        """Return the same samples, all of the length of the longest."""
        samples = [self[index] for index in range(len(self))]
        return InMemory(*(torch.stack(column) for column in zip(*samples, strict=True)))

    def _padded(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = self._rows[index]
        inputs = torch.full((length,), self._padding, dtype=torch.int64)
        outputs = torch.full((length,), IGNORED, dtype=torch.int64)
        inputs[: len(tokens)], outputs[: len(tokens)] = torch.from_numpy(tokens), torch.from_numpy(targets)
        return inputs, outputs

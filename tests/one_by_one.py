"""A data set that says nothing of itself, so that no thread may load it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset


class OneByOne:
    """Draws, for all that anybody knows, random numbers."""

    def __init__(self, within: TensorDataset) -> None:
        self.within = within

    def __len__(self) -> int:
        return len(self.within)

    def __getitem__(self, index: int) -> Any:
        return self.within[index]

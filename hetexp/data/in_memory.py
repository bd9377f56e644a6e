"""Samples in memory as rows of tensors: a microbatch is one copy of rows, not a copy for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hetexp.data.page_locked import PageLocked
from hetexp.data.sampler import Indices


class InMemory(TensorDataset):
    """torch's `TensorDataset`, which also returns several samples at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        places = torch.as_tensor(indices)
        return list(zip(*(tensor[places].unbind() for tensor in self.tensors), strict=True))


class Rows:
    """Takes microbatches out of tensors, equal to those that `default_collate` makes of single samples.

    Args:
        places: row of each sample; `None`: sample i is row i.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], places: Indices | None = None) -> None:
        self._places = places
        # NumPy copies rows in this thread; torch would start threads beside the step's own.
        self._columns = [(tensor, tensor.numpy() if _in_numpy(tensor) else None) for tensor in tensors]

    @property
    def num_columns(self) -> int:
        """Number of tensors."""
        return len(self._columns)

    def take(self, indices: Indices, memory: PageLocked) -> list[torch.Tensor]:
        """Return the rows of these samples, [len(indices), …] of each tensor.

        Args:
            memory: source of the memory that the rows are copied into.
        """
        rows = indices if self._places is None else self._places[indices]
        taken = []
        for tensor, column in self._columns:
            copy = memory.empty((len(rows), *tensor.shape[1:]), tensor.dtype)
            if column is not None:
                column.take(rows, 0, copy.numpy(), "clip")  # other modes fill a buffer of their own first
            else:
                torch.index_select(tensor, 0, torch.from_numpy(rows), out=copy)
            taken.append(copy)
        return taken


def rows_of(dataset: Dataset[Any]) -> Rows | None:
    """Return the rows of a data set whose samples are rows in memory, else `None`.

    Such data sets are `InMemory`, `TensorDataset` and subsets of them, but not derived classes, which may
    return other samples.
    """
    if type(dataset) is Subset:
        within = _tensors(dataset.dataset)
        if within is None:
            return None
        places = np.asarray(dataset.indices, dtype=np.int64)
        if len(places) and not 0 <= places.min() <= places.max() < len(within[0]):
            return None  # places from the end, or wrong ones: the subset itself handles them
        return Rows(within, places)
    tensors = _tensors(dataset)
    return Rows(tensors) if tensors is not None else None


def _tensors(dataset: Dataset[Any]) -> tuple[torch.Tensor, ...] | None:
    if type(dataset) not in (InMemory, TensorDataset):
        return None
    tensors: tuple[torch.Tensor, ...] = dataset.tensors  # type: ignore[attr-defined]
    return tensors if tensors and all(map(_plain, tensors)) else None


def _plain(tensor: torch.Tensor) -> bool:
    ordinary = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return ordinary and tensor.device.type == "cpu" and not tensor.requires_grad and not tensor.is_quantized


def _in_numpy(tensor: torch.Tensor) -> bool:
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    try:
        tensor.numpy()
    except TypeError:  # NumPy has no bfloat16
        return False
    return True

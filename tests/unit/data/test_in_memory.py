"""Rows taken at once are what `default_collate` makes of the samples one by one, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from hetexp.data.digits import Digits
from hetexp.data.in_memory import InMemory, rows_of
from hetexp.data.page_locked import PageLocked
from hetexp.data.synthetic import Synthetic
from hetexp.data.text import Text

NUMBERS = torch.arange(60).reshape(10, 2, 3)
TENSORS = {
    "floats": (NUMBERS.float() / 7, torch.arange(10)),
    "doubles": (NUMBERS.double() / 7, torch.arange(10) % 2 == 0),
    "bfloat16": (NUMBERS.bfloat16(), torch.arange(10, dtype=torch.int32)),
    "half and complex": (NUMBERS.half(), torch.arange(10) * 1j),
    "transposed": (NUMBERS.float().transpose(0, 1).contiguous().transpose(0, 1), torch.arange(10)),
    "one for all": (torch.ones(1, 3).expand(10, 3), torch.arange(20)[::2]),
    "a part": (torch.arange(11)[1:], torch.arange(11)[:-1]),
    "conjugated": (torch.conj(torch.arange(10) * 1j),),
    "empty": (torch.ones(10, 0),),
}


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("kind", [TensorDataset, InMemory])
@pytest.mark.parametrize("indices", [[3], [9, 0, 0, 4], list(range(10))])
def test_rows_are_the_samples_collated(name: str, kind: type[TensorDataset], indices: list[int]) -> None:
    dataset = kind(*TENSORS[name])
    rows = rows_of(dataset)
    assert rows is not None
    taken = rows.take(np.array(indices), PageLocked(False))
    assert_equal(taken, default_collate([dataset[index] for index in indices]))
    within = Subset(dataset, [7, 7, 1, 0, 9, 2, 3, 4, 5, 6])
    of_subset = rows_of(within)
    assert of_subset is not None
    taken = of_subset.take(np.array(indices), PageLocked(False))
    assert_equal(taken, default_collate([within[index] for index in indices]))


def test_what_is_taken_is_a_copy() -> None:
    dataset = InMemory(torch.zeros(4, 2))
    rows = rows_of(dataset)
    assert rows is not None
    (taken,) = rows.take(np.arange(4), PageLocked(False))
    taken += 1
    assert dataset.tensors[0].sum() == 0


class Derived(TensorDataset):
    pass


@pytest.mark.parametrize(
    "dataset",
    [
        Derived(torch.ones(3)),
        [torch.ones(2)],
        TensorDataset(torch.ones(3, requires_grad=True)),
        TensorDataset(torch.ones(3), torch.eye(3).to_sparse()),
        Subset(TensorDataset(torch.ones(3)), [0, -1]),
        Subset(TensorDataset(torch.ones(3)), [0, 3]),
        Subset(Derived(torch.ones(3)), [0]),
    ],
)
def test_nothing_else_is_taken_for_rows(dataset: Dataset[Any]) -> None:
    assert rows_of(dataset) is None


@pytest.mark.parametrize("source", [Digits, Text, Synthetic, lambda: Synthetic(kind="tokens")])
def test_shipped_data_are_rows(source: Any) -> None:
    data = source()
    for dataset in (data.train, data.evaluation):
        assert rows_of(dataset) is not None
        plain = DataLoader(TensorDataset(*dataset.tensors), batch_size=20)
        assert type(dataset.__getitems__([2, 0])) is list
        for many, one_by_one in zip(DataLoader(dataset, batch_size=20), plain, strict=True):
            assert_equal(many, one_by_one)

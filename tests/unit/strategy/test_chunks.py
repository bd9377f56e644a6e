"""Unequal chunks: all samples, in order, and no chunk that is empty."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hetexp.core.split import apportion
from hetexp.strategy.chunks import move, scatter

WEIGHTS: dict[int, list[tuple[float, ...]]] = {
    2: [(1, 1), (3, 1), (0.95, 0.05), (0, 1)],
    3: [(1, 1, 1), (5, 2, 1), (0.8, 0.15, 0.05), (1, 0, 1)],
    4: [(1, 1, 1, 1), (8, 4, 2, 1), (0.97, 0.01, 0.01, 0.01), (0, 0, 1, 0)],
}


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_chunks_of_every_size(num_devices: int) -> None:
    for weights in WEIGHTS[num_devices]:
        total = sum(weights)
        for count in range(1, 41):
            sizes = apportion(count, weights).counts
            used = [size for size in sizes if size]
            chunks = scatter(torch.arange(count), used)
            assert [len(chunk) for chunk in chunks] == used
            assert torch.cat(chunks).tolist() == list(range(count))
            # Nobody is more than a sample away from its part, and a weight of 0 is nothing at all.
            for size, weight in zip(sizes, weights, strict=True):
                assert abs(size - count * weight / total) < 1
                assert weight or not size


class Pair(NamedTuple):
    one: Any
    other: Any


def test_nested_inputs_are_cut_alike() -> None:
    rows, matrix = torch.arange(6), torch.arange(12).reshape(6, 2)
    value = {"rows": rows, "pair": Pair(matrix, "word"), "list": [rows, torch.tensor(7)], "none": None}
    first, second = scatter(value, [4, 2])
    assert first["rows"].tolist() == [0, 1, 2, 3]
    assert second["rows"].tolist() == [4, 5]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].one.tolist() == [[8, 9], [10, 11]]
    assert (first["pair"].other, second["none"]) == ("word", None)
    assert (second["list"][0].tolist(), second["list"][1].item()) == ([4, 5], 7)
    moved = move(second, torch.device("meta"))
    assert moved["pair"].one.is_meta
    assert moved["list"][1].is_meta
    assert moved["pair"].other == "word"


def test_another_dimension_counts_the_samples() -> None:
    first, second = scatter((torch.arange(12).reshape(2, 6), torch.arange(3)), [4, 2], dim=1)
    assert (first[0].shape, second[0].shape) == ((2, 4), (2, 2))
    assert first[1].tolist() == second[1].tolist() == [0, 1, 2]

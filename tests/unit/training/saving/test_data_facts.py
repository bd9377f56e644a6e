"""What distinguishes the contents of data, between ranks and between runs."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from hetexp.training.saving.data_facts import changes, contents, contents_problems, differing_samples


class Listed:
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


Point = namedtuple("Point", ["x", "y"])
PICTURE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
PAIRS: dict[str, tuple[Any, Any]] = {
    "a label": ((torch.ones(3), 1), (torch.ones(3), 2)),
    "a text": ("a cat", "a dog"),
    "a key": ({"x": torch.ones(3)}, {"y": torch.ones(3)}),
    "a class's number": (torch.tensor([1, 2]), torch.tensor([2, 1])),
    "a shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "a number": (0.5, 0.6),
    "numbers": (np.linspace(0, 1, 9), np.linspace(0, 1.1, 9)),
    "the order of numbers": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])),
    "half precision": (torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 2, dtype=torch.bfloat16)),
    "complex numbers": (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
    "a picture": (PICTURE, PICTURE[::-1]),
    "a part of several": (Point(torch.ones(2), [1, (None, True)]), Point(torch.ones(2), [1, (None, False)])),
    "a missing value": (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
    "a sparse tensor": (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_other_samples_differ_and_equal_ones_do_not(pair: tuple[Any, Any]) -> None:
    one, same, other = (contents(Listed([sample, sample])) for sample in (pair[0], pair[0], pair[1]))
    assert one.keys() == {"0", "1"}
    assert differing_samples(one, same) == []
    assert differing_samples(one, other) == [0, 1]


def test_the_last_bits_of_another_processor_are_no_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, 8, 8, generator=generator)
    other = x * (1 + 1e-6 * torch.randn(x.shape, generator=generator))
    assert differing_samples(contents(TensorDataset(x)), contents(TensorDataset(other))) == []
    shuffled = x[torch.randperm(20, generator=generator)]
    assert len(differing_samples(contents(TensorDataset(x)), contents(TensorDataset(shuffled)))) >= 4


class Noisy(Listed):
    def __init__(self, own: bool) -> None:
        super().__init__([0] * 10)
        self._own = np.random.default_rng() if own else None

    def __getitem__(self, index: int) -> Any:
        if self._own is not None:
            return self._own.normal()
        return random.random() + np.random.rand() + torch.rand(3)


def test_random_numbers_follow_one_seed_and_states_stay() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    first = contents(Noisy(own=False))
    assert len(first) == 5
    drawn = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    assert drawn == (random.random(), np.random.rand(), float(torch.rand(())))
    assert differing_samples(first, contents(Noisy(own=False))) == []  # another state, the same samples
    assert contents(Noisy(own=True)) == {}


class Broken(Listed):
    def __getitem__(self, index: int) -> Any:
        if index:
            raise OSError("no such file")
        return 1


def test_what_cannot_be_read_is_left_out() -> None:
    assert contents(Broken([0] * 9)).keys() == {"0"}
    assert contents(None) == {}
    assert contents(iter([1, 2])) == {}
    assert contents(Listed([1])).keys() == {"0"}


def test_the_problem_names_the_data_the_sample_and_the_rank() -> None:
    facts = [
        {"training": contents(Listed([1, 2, 3])), "evaluation": contents(Listed([last]))}
        for last in (5, 5, 6)
    ]
    (problem,) = contents_problems(facts, ["rank 0", "rank 1", "rank 2"])
    assert problem.startswith("sample 0 of the evaluation data is another one on rank 2 than on rank 0.")
    assert contents_problems([{}, {}], ["a", "b"]) == []  # a rank of an earlier version


def test_changes_since_a_checkpoint() -> None:
    data = contents(Listed([1, 2, 3]))
    saved = {
        "training_samples": 3,
        "evaluation_samples": 0,
        "sample_order": "a",
        "contents": {"training": data, "evaluation": {}},
    }
    assert changes(saved, saved) == ([], [])
    assert changes(saved, saved | {"sample_order": "b"}) == (["another order of the samples"], [])
    assert changes(saved, saved | {"training_samples": 4}) == (["4 samples instead of 3"], [])
    assert changes(saved, saved | {"evaluation_samples": 1}) == ([], ["1 samples instead of 0"])
    other = {"training": contents(Listed([1, 2, 4])), "evaluation": {}}
    assert changes(saved, saved | {"contents": other}) == (["another sample 2"], [])

"""What stands before a model, and what a rank without samples does with it."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from hetexp.data.sampler import GlobalSampler, Position
from hetexp.library.batches import on_device, part_batches, steps_left
from hetexp.library.front import keeping_statistics

Pair = namedtuple("Pair", "one other")


def test_a_single_sample_teaches_no_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with keeping_statistics(model):
        output = model(torch.ones(1, 2))  # in training mode BatchNorm refuses a single sample
        assert model.training
        assert model[2].training
    assert not output.requires_grad
    assert model[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tensors_move_in_the_containers_they_came_in() -> None:
    class Own:
        def to(self, device: torch.device) -> str:
            return f"on {device}"

    meta = torch.device("meta")
    value: Any = {"a": (torch.ones(1), [torch.ones(2), "text"]), "b": Pair(torch.ones(3), 7), "c": Own()}
    moved = on_device(value, meta)
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].one.is_meta
    assert moved["b"].other == 7
    assert moved["c"] == "on meta"


@pytest.mark.parametrize(
    ("position", "drop_last", "expected"),
    [
        (Position(0, 0), False, (Position(0, 0), 3)),
        (Position(1, 8), False, (Position(1, 8), 2)),
        (Position(1, 16), True, (Position(2, 0), 2)),
        (Position(1, 20), False, (Position(2, 0), 3)),
    ],
)
def test_steps_left(position: Position, drop_last: bool, expected: tuple[Position, int]) -> None:
    assert steps_left(GlobalSampler(20, 8, 0, drop_last), position) == expected


def test_parts_of_an_evaluation() -> None:
    data: Any = torch.arange(10)
    found = [batch.tolist() for batch, _ in part_batches(data, (2, 9), 3, 0, torch.stack)]
    assert sum(found, []) == list(range(2, 9))
    assert max(map(len, found)) == 3
    assert list(part_batches(data, (4, 4), 3, 0, torch.stack)) == []

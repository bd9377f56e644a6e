"""Microbatches go to page-locked memory where the device copies from it, and only there."""

from __future__ import annotations

import logging
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from hetexp.data.page_locked import PageLocked, on_device
from hetexp.hardware.backend import backend_class

Pair = namedtuple("Pair", "inputs targets")


class Own:
    """A batch of a library's own."""

    held = False

    def pin_memory(self) -> Own:
        self.held = True
        return self


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was asked to be locked; it is copied, as torch would."""
    tensors: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return tensors


def test_backends_say_whether_they_copy_from_it() -> None:
    kinds = {
        name: backend_class(name).copies_page_locked for name in ("cpu", "emulated", "cuda", "hip", "mps")
    }
    assert kinds == {"cpu": False, "emulated": False, "cuda": True, "hip": True, "mps": False}


def test_nothing_is_locked_where_nobody_wants_it(asked: list[torch.Tensor]) -> None:
    batch = [torch.ones(2), torch.zeros(2)]
    assert PageLocked(False).hold(batch) is batch
    assert not PageLocked(False).empty((2, 3), torch.int64).is_pinned()
    assert asked == []


def test_every_tensor_of_a_batch_is_locked(asked: list[torch.Tensor]) -> None:
    inputs, targets, own = torch.ones(2), torch.zeros(2), Own()
    batch: Any = [{"a": inputs, "b": (targets, "text")}, Pair(inputs, [targets, 3]), own]
    held = PageLocked(True).hold(batch)
    assert [id(tensor) for tensor in asked] == [id(inputs), id(targets), id(inputs), id(targets)]
    assert torch.equal(held[0]["a"], inputs)
    assert held[0]["b"][1] == "text"
    assert type(held[1]) is Pair
    assert held[1].targets[1] == 3
    assert held[2].held


def test_a_system_without_room_for_it_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore about it")

    memory, batch = PageLocked(True), [torch.ones(2)]
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with caplog.at_level(logging.WARNING):
        assert memory.hold(batch) is batch
        assert memory.hold(batch) is batch
        assert memory.empty((2,), torch.float64).shape == (2,)
    (record,) = caplog.records
    assert record.message.endswith("now wait: CUDA error: out of memory")


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.arange(6.0).reshape(2, 3) + i, i) for i in range(3)],
        [{"a": torch.tensor(i), "b": [torch.ones(2) * i, np.full(3, i)]} for i in range(2)],
        [torch.ones(2, dtype=torch.float32), torch.ones(2, dtype=torch.float64)],
        [torch.ones(2, requires_grad=True), torch.ones(2)],
    ],
)
def test_samples_stack_as_default_collate_does(samples: list[Any]) -> None:
    expected, stacked = default_collate(samples), PageLocked(False).stacked(samples)
    torch.testing.assert_close(stacked, expected, rtol=0, atol=0)


def test_samples_of_several_shapes_are_refused_as_by_default_collate() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        PageLocked(False).stacked([torch.ones(2), torch.ones(3)])


def test_images_alone_lie_with_their_channels_last() -> None:
    batch = {
        "image": torch.randn(2, 3, 4, 5),
        "row": torch.ones(2, 3),
        "labels": torch.ones(2, 3, 4, 5).long(),
    }
    moved = on_device(batch, torch.device("cpu"), torch.float32, channels_last=True)
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(moved[name], value) for name, value in batch.items())
    assert moved["row"].is_contiguous()
    assert moved["labels"].is_contiguous()
    assert on_device(batch, torch.device("cpu"), torch.float32)["image"].is_contiguous()

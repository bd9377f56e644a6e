"""The modelled memory: what a step holds, counted by hand, and the error when it is too much."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hetexp.hardware.emulation.memory_model import CONTEXT_BYTES, ModelledAllocator

PLENTY = 2**40
NAME = "emulated:0 (Tiny (emulated))"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


WEIGHTS = 4 * (8 * 16 + 16 + 16 * 4 + 4)


def activations(samples: int) -> int:
    """Inputs (8 numbers a sample), and the ReLU's result (16), which it and the next layer keep once."""
    return 4 * samples * (8 + 16)


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def allocator(model: nn.Module, capacity: int = PLENTY) -> ModelledAllocator:
    return ModelledAllocator(model, sgd(model), capacity, NAME)


# ---------------------------------------------------------------- what is held


def test_between_steps_by_hand() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    memory = ModelledAllocator(model, optimizer, PLENTY, NAME)
    assert memory.static_bytes() == CONTEXT_BYTES + 2 * WEIGHTS  # with the gradients
    model(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
    # Two moments a weight, and a step counter of four bytes for each of the four tensors.
    assert memory.static_bytes() == CONTEXT_BYTES + 4 * WEIGHTS + 4 * 4


@pytest.mark.parametrize(("momentum", "copies"), [(0.0, 2), (0.9, 3)])
def test_the_state_is_that_of_the_optimizer(momentum: float, copies: int) -> None:
    model = mlp()
    optimizer = sgd(model, momentum)
    memory = ModelledAllocator(model, optimizer, PLENTY, NAME)
    model(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
    assert memory.static_bytes() == CONTEXT_BYTES + copies * WEIGHTS


def test_frozen_weights_have_no_gradients_and_buffers_neither() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    model[0].requires_grad_(False)
    linear, norm, statistics = 4 * (8 * 16 + 16), 4 * 32, 4 * 32 + 8
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    memory = ModelledAllocator(model, optimizer, PLENTY, NAME)
    assert memory.static_bytes() == CONTEXT_BYTES + linear + 2 * norm + statistics


def test_tied_weights_are_held_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert allocator(model).static_bytes() == CONTEXT_BYTES + 2 * 4 * 64


@pytest.mark.parametrize("samples", [1, 5, 64])
def test_a_forward_pass_by_hand(samples: int) -> None:
    model = mlp()
    memory = allocator(model)
    model(torch.zeros(samples, 8))
    assert memory.peak_bytes == memory.static_bytes() + activations(samples)


def test_weights_that_backward_needs_are_not_counted_again() -> None:
    model = nn.Linear(512, 4, bias=False)
    memory = allocator(model)
    # The inputs' gradient needs the weight, which is kept as a transposed view.
    model(torch.zeros(1, 512, requires_grad=True))
    assert memory.peak_bytes == CONTEXT_BYTES + 2 * 4 * 512 * 4 + 4 * 512


def test_views_share_their_storage() -> None:
    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            scaled = value * self.weight  # keeps its input
            return scaled.view(2, -1).square() + scaled.view(-1).square().sum()  # two views of one result

    model = Shaped()
    memory = allocator(model)
    model(torch.zeros(6))
    assert memory.peak_bytes == CONTEXT_BYTES + 2 * 4 + 4 * 6 + 4 * 6


def test_inputs_that_nobody_keeps_are_held_while_they_are_used() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.weight + x.sum() + ids.sum()

    model = Sum()
    memory = allocator(model)
    model(torch.zeros(5), ids=torch.zeros(3, dtype=torch.int64))
    assert memory.peak_bytes == CONTEXT_BYTES + 2 * 4 + 5 * 4 + 3 * 8


def test_an_evaluation_keeps_nothing_for_backward() -> None:
    model = mlp()
    memory = allocator(model)
    with torch.inference_mode():
        model(torch.zeros(64, 8))
    assert memory.peak_bytes == memory.static_bytes() + 4 * 64 * 8


def test_microbatches_follow_one_another() -> None:
    """Each frees what the one before held: the peak is the largest one's."""
    model = mlp()
    memory = allocator(model)
    peaks = []
    for samples in (4, 16, 8, 16):
        model(torch.zeros(samples, 8)).sum().backward()
        peaks.append(memory.peak_bytes - memory.static_bytes())
    assert peaks == [activations(4)] + [activations(16)] * 3


def test_the_peak_grows_with_the_optimizer_state() -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    memory = ModelledAllocator(model, optimizer, PLENTY, NAME)
    peaks = []
    for _ in range(2):
        model(torch.zeros(4, 8)).sum().backward()
        optimizer.step()
        peaks.append(memory.peak_bytes)
    assert peaks[1] - peaks[0] == WEIGHTS


def test_a_device_without_samples_holds_the_model_all_the_same() -> None:
    memory = allocator(mlp())
    assert memory.peak_bytes == CONTEXT_BYTES + 2 * WEIGHTS


# ---------------------------------------------------------------- too much


@pytest.mark.parametrize("fits", [1, 7, 100])
def test_a_growing_batch_fails_at_the_right_size(fits: int) -> None:
    model = mlp()
    capacity = CONTEXT_BYTES + 2 * WEIGHTS + activations(fits)
    memory = allocator(model, capacity)
    tried: list[int] = []

    def grow() -> None:
        for samples in itertools.count(1):
            tried.append(samples)
            model(torch.zeros(samples, 8)).sum().backward()

    with pytest.raises(torch.OutOfMemoryError, match=re.escape(f"Out of memory on {NAME}. ")):
        grow()
    assert tried == list(range(1, fits + 2))
    assert memory.peak_bytes == capacity


def test_the_error_says_what_was_asked_and_what_was_there() -> None:
    model = mlp()
    allocator(model, CONTEXT_BYTES + 2 * WEIGHTS + 2**21)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.zeros(2**17, 8))
    text = str(caught.value)
    assert "Tried to allocate 4.00 MiB" in text  # the inputs
    assert "total capacity of 0.29 GiB" in text
    assert "2.00 MiB is free" in text


def test_weights_that_do_not_fit_fail_at_the_first_pass() -> None:
    model = mlp()
    allocator(model, CONTEXT_BYTES + WEIGHTS)
    with pytest.raises(torch.OutOfMemoryError, match="0.00 MiB is free"):
        model(torch.zeros(1, 8))


class Failing(nn.Module):
    """Keeps something for backward, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fail = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(value)
        if self.fail:
            raise ArithmeticError
        return output


def test_nothing_is_counted_after_a_failed_pass() -> None:
    model = Failing()
    memory = allocator(model)
    model(torch.zeros(2, 8))
    model.fail = True
    with pytest.raises(ArithmeticError):
        model(torch.zeros(2, 8))
    before = memory.peak_bytes
    torch.ones(2**16, requires_grad=True).square().sum()
    assert memory.peak_bytes == before
    model.fail = False
    model(torch.zeros(2, 8)).sum().backward()
    assert memory.peak_bytes == before


def test_nothing_is_counted_after_the_memory_ran_out() -> None:
    model = mlp()
    memory = allocator(model, CONTEXT_BYTES + 2 * WEIGHTS + activations(4))
    for samples in (5, 1000):  # the ReLU's result is too much, then the inputs already
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.zeros(samples, 8))
    before = memory.peak_bytes
    torch.ones(2**16, requires_grad=True).square().sum()
    assert memory.peak_bytes == before
    model(torch.zeros(4, 8)).sum().backward()
    assert memory.peak_bytes == memory.static_bytes() + activations(4)


# ---------------------------------------------------------------- nothing else changes


def test_results_and_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    memory = allocator(model)
    inputs = torch.randn(5, 8)
    results = []
    for one in (model, plain):
        output = one(inputs)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in one.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert memory.peak_bytes > 0


class Kept(nn.Module):
    """Its last layer keeps its own result for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(value)
        return output.exp()


@pytest.mark.parametrize("backward", [True, False])
def test_results_are_freed(backward: bool) -> None:
    model = Kept()
    allocator(model)

    def step() -> weakref.ref[Any]:
        output = model(torch.zeros(2, 4))
        if backward:
            output.sum().backward()
        return weakref.ref(output)

    reference = step()
    gc.collect()
    assert reference() is None


def test_pieces_hold_what_their_microbatches_keep_until_backward() -> None:
    model = mlp()
    memory = ModelledAllocator(model, sgd(model), PLENTY, NAME, [model])
    first, second = model(torch.zeros(5, 8)), model(torch.zeros(5, 8))
    assert memory.peak_bytes == CONTEXT_BYTES + 2 * WEIGHTS + 2 * activations(5)
    first.sum().backward()
    second.sum().backward()
    with torch.no_grad():
        model(torch.zeros(5, 8))  # an evaluation keeps nothing
    model(torch.zeros(5, 8))
    assert memory.peak_bytes == CONTEXT_BYTES + 2 * WEIGHTS + 2 * activations(5)

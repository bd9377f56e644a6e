"""Evaluation counts each sample once, however many ranks there are (case 5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import own_loop
import pytest
import torch
from fake_ranks import FakeGroup
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.training.evaluate import evaluate
from hetexp.training.state import TrainState

MakeState = Callable[..., TrainState]


class Wrong(nn.Module):
    """Predicts class 0, but class 1 where the input says so: two rows of 21 are hard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: list[float] = []
        self.batches: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert not self.training
        self.seen += inputs[:, 0].tolist()
        self.batches.append(len(inputs))
        hard = inputs[:, 1:2]
        return torch.cat([1 - hard, hard], dim=1) * self.scale


def rows(count: int = 21, hard: tuple[int, ...] = (3, 20)) -> TensorDataset:
    """Inputs [count, 2]: the row's number, and whether it is hard; the right class is always 0."""
    inputs = torch.stack([torch.arange(count).float(), torch.zeros(count)], dim=1)
    inputs[list(hard), 1] = 1.0
    return TensorDataset(inputs, torch.zeros(count, dtype=torch.int64))


def run(
    make_state: MakeState, weights: list[float], **options: Any
) -> tuple[list[dict[str, float]], list[Wrong]]:
    """Evaluate on as many ranks as there are weights."""
    models = [Wrong() for _ in weights]

    def rank(comm: Communicator) -> dict[str, float]:
        state = make_state(comm, weights, model=models[comm.rank], evaluation=rows(), **options)
        return evaluate(state)

    return FakeGroup(len(weights)).run(rank), models


@pytest.mark.parametrize(
    "weights",
    [[1.0], [1.0, 1.0], [17.0, 4.0], [1.0, 1.0, 1.0], [0.8, 0.15, 0.05], [1.0, 0.0], [0.0, 0.0, 1.0]],
)
@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_every_row_once_and_the_same_accuracy(
    make_state: MakeState, weights: list[float], batch_size: int
) -> None:
    results, models = run(make_state, weights, global_batch_size=batch_size)
    expected_loss = (
        21 * math.log(1 + math.e) - 19
    ) / 21  # a right row has log(1 + e) - 1, a hard one log(1 + e)
    for result in results:
        assert result["samples"] == 21
        assert result["accuracy"] == 19 / 21  # bit for bit
        assert result["loss"] == pytest.approx(expected_loss, rel=1e-5)
        assert result == results[0]  # the same on every rank
    assert sorted(number for model in models for number in model.seen) == list(range(21))
    assert all(model.training for model in models)


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [0.0, 1.0]])
@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_labels_in_a_column_give_the_same_accuracy(
    make_state: MakeState, weights: list[float], batch_size: int
) -> None:
    inputs, targets = rows().tensors
    column = TensorDataset(inputs, targets[:, None])

    def rank(comm: Communicator) -> dict[str, float]:
        return evaluate(
            make_state(comm, weights, model=Wrong(), evaluation=column, global_batch_size=batch_size)
        )

    assert [result["accuracy"] for result in FakeGroup(len(weights)).run(rank)] == [19 / 21] * len(weights)


@pytest.mark.parametrize("weights", [[1.0], [5.0, 2.0, 1.0], [0.0, 1.0]])
def test_masked_tokens_are_neither_right_nor_counted(make_state: MakeState, weights: list[float]) -> None:
    """Accuracy and loss are means over the unmasked tokens, of which samples have different numbers."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(9, 5, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (9, 5), generator=generator)
    targets[torch.rand(9, 5, generator=generator) < 0.4] = -100
    model = nn.Linear(3, 4).double()

    def rank(comm: Communicator) -> dict[str, float]:
        data = TensorDataset(inputs, targets)
        return evaluate(make_state(comm, weights, model=model, evaluation=data, precision="float64"))

    scores, labels = model(inputs).flatten(0, 1), targets.flatten()
    counted = labels != -100
    right = int((scores.argmax(1) == labels)[counted].sum())
    expected = {
        "loss": pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-12),
        "accuracy": right / int(counted.sum()),
        "samples": 9,
    }
    assert 0 < right < int(counted.sum()) < labels.numel()
    assert FakeGroup(len(weights)).run(rank) == [expected] * len(weights)


@pytest.mark.parametrize("weights", [[1.0], [5.0, 2.0, 1.0], [0.0, 1.0]])
def test_weighted_elements_have_the_mean_of_torch(make_state: MakeState, weights: list[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(21, 3, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, torch.randint(3, (21,), generator=generator))
    options: dict[str, Any] = {"loss": "own_loop.Weighted", "precision": "float64"}
    model = nn.Linear(3, 3).double()

    def rank(comm: Communicator) -> dict[str, float]:
        return evaluate(make_state(comm, weights, model=model, evaluation=data, **options))

    expected = nn.functional.cross_entropy(model(inputs), data.tensors[1], own_loop.CLASS_WEIGHTS).item()
    for result in FakeGroup(len(weights)).run(rank):
        assert result == {"loss": pytest.approx(expected, rel=1e-12), "samples": 21}


def test_ranks_take_contiguous_parts_by_their_shares(make_state: MakeState) -> None:
    _, models = run(make_state, [17.0, 4.0])
    assert models[0].seen == list(range(17))
    assert models[1].seen == list(range(17, 21))


def test_batches_are_no_larger_than_in_training(make_state: MakeState) -> None:
    _, models = run(make_state, [3.0, 1.0], accumulate=2)  # 6 and 2 samples a step, in two pieces each
    assert max(models[0].batches) <= 3
    assert max(models[1].batches) == 1
    _, (model,) = run(make_state, [1.0], microbatch_size=5)
    assert max(model.batches) <= 5


def test_a_fast_run_evaluates_a_few_batches(make_state: MakeState) -> None:
    results, _ = run(make_state, [1.0, 1.0], global_batch_size=4, fast_dev_run=2)
    assert [result["samples"] for result in results] == [8, 8]
    results, _ = run(make_state, [1.0, 1.0], global_batch_size=64, fast_dev_run=2)
    assert [result["samples"] for result in results] == [21, 21]  # more than there is


def test_no_evaluation_data(make_state: MakeState) -> None:
    assert evaluate(make_state(SoloCommunicator())) == {}


def test_a_loss_without_right_and_wrong_has_no_accuracy(make_state: MakeState) -> None:
    data = TensorDataset(torch.randn(7, 3), torch.zeros(7, 4))

    def rank(comm: Communicator) -> dict[str, float]:
        # Rank 1 has no sample and so never asks the loss.
        return evaluate(make_state(comm, [1.0, 0.0], evaluation=data, loss="mse"))

    results = FakeGroup(2).run(rank)
    assert [set(result) for result in results] == [{"loss", "samples"}] * 2
    model = make_state(SoloCommunicator()).model
    with torch.no_grad():
        assert results[0]["loss"] == pytest.approx(float(model(data.tensors[0]).square().mean()), rel=1e-6)


def test_only_ignored_labels_have_no_mean(make_state: MakeState) -> None:
    data = TensorDataset(torch.randn(4, 3), torch.full((4,), -100))
    result = evaluate(make_state(SoloCommunicator(), evaluation=data))
    assert result["samples"] == 4
    assert result["loss"] != result["loss"]  # NaN: there is nothing to take a mean of
    assert "accuracy" not in result


def test_dropout_rests_and_no_gradient_is_kept(make_state: MakeState) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9))
    data = TensorDataset(torch.randn(6, 3), torch.randint(4, (6,)))
    state = make_state(SoloCommunicator(), model=model, evaluation=data)
    assert evaluate(state) == evaluate(state)
    assert all(p.grad is None for p in model.parameters())


def test_inputs_arrive_in_the_runs_precision(make_state: MakeState) -> None:
    data = TensorDataset(torch.randn(6, 3), torch.randint(4, (6,)))
    result = evaluate(make_state(SoloCommunicator(), evaluation=data, precision="float64"))
    single = evaluate(make_state(SoloCommunicator(), evaluation=data))
    assert result["loss"] == pytest.approx(single["loss"], rel=1e-5)
    assert result["loss"] != single["loss"]

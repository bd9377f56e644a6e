"""Replicas that drift apart are found and named; rounding is none of that."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_ranks import FakeGroup
from torch import nn

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.training.loop import train
from hetexp.training.replicas import ReplicaCheck, ReplicaError, fingerprint
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]


def compare(
    make_state: MakeState, change: Callable[[TrainState], object], ranks: int = 2, **options: Any
) -> None:
    """Compare the replicas after a change on the last rank."""
    original = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def rank(comm: Communicator) -> None:
        model = copy.deepcopy(original)
        state = make_state(comm, [1.0] * ranks, model=model, **options)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if comm.rank == ranks - 1:
            with torch.no_grad():
                change(state)
        ReplicaCheck(state).compare(7)

    FakeGroup(ranks).run(rank)


def first(state: TrainState) -> torch.Tensor:
    return next(state.model.parameters())


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_equal_replicas_pass_and_rounding_does(make_state: MakeState, precision: str) -> None:
    compare(make_state, lambda state: None, precision=precision)
    size = 1e-6 if precision == "float32" else 1e-14
    compare(make_state, lambda state: first(state).mul_(1 + size), precision=precision)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_weight_that_moved_on_one_rank_is_named(make_state: MakeState, ranks: int) -> None:
    def move(state: TrainState) -> None:
        first(state)[1, 2] += 0.01

    with pytest.raises(ReplicaError) as caught:
        compare(make_state, move, ranks)
    told = str(caught.value)
    assert "After step 7" in told and "the weight of 0.weight differs" in told
    assert "rank 0, cpu:0 (" in told and f"rank {ranks - 1}, cpu:{ranks - 1} (" in told
    assert told.count("norm") == ranks + 1 and "too." not in told


def test_weights_that_changed_places_are_found(make_state: MakeState) -> None:
    """Sum, norm and largest magnitude stay as they were."""
    with pytest.raises(ReplicaError, match=r"the weight of 0\.weight"):
        compare(make_state, lambda state: first(state).copy_(first(state).flip(0).clone()))


def test_a_gradient_that_was_not_exchanged_is_found(make_state: MakeState) -> None:
    def own(state: TrainState) -> None:
        assert (gradient := first(state).grad) is not None
        gradient[0, 0] = 1.5

    with pytest.raises(ReplicaError, match=r"the gradient of 0\.weight"):
        compare(make_state, own)

    def forget(state: TrainState) -> None:
        first(state).grad = None

    with pytest.raises(ReplicaError, match=r"the gradient of 0\.weight"):
        compare(make_state, forget)


def test_numbers_that_are_none_on_one_rank_only(make_state: MakeState) -> None:
    with pytest.raises(ReplicaError, match=r"weight of 0\.weight differs by about inf"):
        compare(make_state, lambda state: first(state)[0].fill_(float("nan")))


def test_buffers_are_only_warned_of(make_state: MakeState, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compare(make_state, lambda state: state.model[1].running_mean.add_(1.0))  # type: ignore[index]
    (message,) = caplog.messages
    assert "the buffer of 1.running_mean differs" in message and "Rank 0's is saved" in message


def test_when_it_is_due(make_state: MakeState) -> None:
    def steps(comm: Communicator) -> list[int]:
        check = ReplicaCheck(make_state(comm, [1.0, 1.0], check_sync_every=3))
        found = []
        for step, synchronised in enumerate([True, True, False, False, True, True, True, True], start=1):
            if check.due(step, synchronised):
                found.append(step)
                check.compare(step)
        return found

    assert FakeGroup(2).run(steps)[0] == [5, 6]  # step 3's at the next synchronisation
    check = ReplicaCheck(make_state(SoloCommunicator(), check_sync_every=1))
    assert not check.due(1, True)


def test_a_training_that_stays_together_is_not_disturbed(make_state: MakeState) -> None:
    def rank(comm: Communicator, every: int) -> list[torch.Tensor]:
        state = make_state(comm, [3.0, 1.0], check_sync_every=every, clip_norm=0.1)
        train(state, Progress())
        return [parameter.detach() for parameter in state.model.parameters()]

    checked = FakeGroup(2).run(lambda comm: rank(comm, 1))[0]
    plain = FakeGroup(2).run(lambda comm: rank(comm, 0))[0]
    for one, other in zip(checked, plain, strict=True):
        assert torch.equal(one, other)


def test_fingerprints() -> None:
    value = torch.randn(2**20 + 100, generator=torch.Generator().manual_seed(0))
    projection, square, largest = fingerprint(value, 3)
    assert fingerprint(value, 3) == (projection, square, largest)
    assert fingerprint(value, 4)[0] != projection
    assert square == pytest.approx(float(value.double().square().sum()))
    assert largest == float(value.abs().max())
    assert abs(projection) < 6 * square**0.5
    assert fingerprint(torch.zeros(0), 0) == (0.0, 0.0, 0.0)
    assert fingerprint(torch.tensor(True), 0)[1:] == (1.0, 1.0)
    assert fingerprint(torch.tensor([3 + 4j]), 0)[1] == 25.0
    assert fingerprint(torch.tensor([0.0, 2.0, 0.0]).to_sparse(), 0)[1] == 4.0
    assert fingerprint(torch.tensor([1.0, float("nan")]), 0)[2] == float("inf")

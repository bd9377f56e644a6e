"""Exchanges of a user's own between threads: unequal shares, non-finite gradients, and counted bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fake_ranks import FakeGroup
from torch import nn
from torch.utils.data import TensorDataset

import hetexp
from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.strategy.synchronous import GradientExchange
from hetexp.training.loop import Outcome, train
from hetexp.training.recovery.oom_recovery import recovering_guard
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]
Trained = list[tuple[TrainState, Outcome]]


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save nothing: what checkpoints hold is tested elsewhere."""
    monkeypatch.setattr("hetexp.training.loop.save", lambda *_, **__: None)


class Sum(hetexp.Synchronous):
    """Exchanges as ddp does, and counts how often."""

    name = "sum"

    def __init__(self) -> None:
        self.exchanges = 0

    def exchange(self, gradient: torch.Tensor, ranks: GradientExchange) -> torch.Tensor:
        self.exchanges += 1
        return ranks.sum_(gradient)


class Overflowing(Sum):
    """Makes an infinite gradient of finite ones."""

    def exchange(self, gradient: torch.Tensor, ranks: GradientExchange) -> torch.Tensor:
        return super().exchange(gradient, ranks) * torch.inf


def flat(state: TrainState) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in state.model.parameters()])


def run(
    make_state: MakeState, weights: Sequence[float], strategy: Callable[[], Any] = Sum, **options: Any
) -> Trained:
    """Train on as many threads as there are weights."""

    def rank(comm: Communicator) -> tuple[TrainState, Outcome]:
        state = make_state(comm, weights, strategy=strategy(), **options)
        return state, train(state, Progress())

    return FakeGroup(len(weights)).run(rank)


def with_nan() -> TensorDataset:
    """Samples of which one is no number."""
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    inputs[5] = torch.nan
    return TensorDataset(inputs, torch.arange(24) % 4)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (5.0, 2.0, 1.0), (1.0, 0.0)])
def test_the_parts_add_up_to_the_gradient_of_one_device(
    make_state: MakeState, weights: tuple[float, ...]
) -> None:
    options: dict[str, Any] = {"precision": "float64", "clip_norm": 0.5}
    alone = make_state(SoloCommunicator(), **options)
    train(alone, Progress())
    for state, _ in run(make_state, weights, **options):
        assert float((flat(state) - flat(alone)).abs().max()) <= 1e-12
        assert state.engine.sent_bytes(3) == 8 * len(flat(state))


def test_no_exchange_sees_a_gradient_that_is_not_finite(make_state: MakeState) -> None:
    options: dict[str, Any] = {"train": with_nan(), "non_finite": "skip"}
    trained = run(make_state, (1.0, 1.0), **options)
    for state, _ in trained:
        assert state.strategy.exchanges == 2  # type: ignore[attr-defined]
        assert bool(flat(state).isfinite().all())
    assert torch.equal(flat(trained[0][0]), flat(trained[1][0]))


def test_a_sum_that_overflows_changes_no_weights(make_state: MakeState) -> None:
    begun = flat(make_state(SoloCommunicator()))
    for state, _ in run(make_state, (1.0, 1.0), Overflowing, non_finite="skip"):
        assert torch.equal(flat(state), begun)


class Small(nn.Linear):
    """Has no memory for more than two samples at once, if it is small."""

    def __init__(self, small: bool) -> None:
        super().__init__(3, 4)
        self.small = small
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.small and len(input) > 2:
            raise torch.OutOfMemoryError("no memory")
        return super().forward(input)


def test_all_take_a_step_again_for_which_one_has_no_memory(make_state: MakeState) -> None:
    def trained(comm: Communicator, short: bool) -> torch.Tensor:
        model = Small(short and comm.rank == 1)
        weights = (1.0,) * comm.world_size
        state = make_state(comm, weights, strategy=Sum(), model=model, precision="float64")
        state.guard = recovering_guard(state, together=True)
        train(state, Progress())
        assert state.strategy.exchanges == 3  # type: ignore[attr-defined]
        return flat(state)

    alone = trained(SoloCommunicator(), False)
    for weights in FakeGroup(2).run(lambda comm: trained(comm, True)):
        assert float((weights - alone).abs().max()) <= 1e-12


def test_a_run_without_exchange_sends_nothing(make_state: MakeState) -> None:
    for state, _ in run(make_state, (1.0, 1.0), exchange=False):
        assert state.strategy.exchanges == 0  # type: ignore[attr-defined]
        assert state.engine.sent_bytes(3) == 0

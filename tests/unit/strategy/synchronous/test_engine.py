"""Exchanges of a user's own between threads: unequal shares, non-finite gradients, and counted bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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


class Kept(Sum):
    """Keeps the sum of all gradients that it has seen."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.seen: torch.Tensor | None = None
        self._broken = broken

    def exchange(self, gradient: torch.Tensor, ranks: GradientExchange) -> torch.Tensor:
        self.seen = gradient.clone() if self.seen is None else self.seen + gradient
        return super().exchange(gradient, ranks) * (torch.inf if self._broken else 1.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {} if self.seen is None else {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.seen = state.get("seen")


def test_a_step_that_is_left_out_leaves_the_strategy_as_it_was(make_state: MakeState) -> None:
    for state, _ in run(make_state, (1.0, 1.0), lambda: Kept(broken=True), non_finite="skip"):
        assert state.strategy.exchanges == 3 and state.strategy.state_dict() == {}  # type: ignore[attr-defined]


def test_each_rank_gets_its_own_state_back_and_others_start_afresh(
    make_state: MakeState, tmp_path: Path
) -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        state = make_state(comm, (3.0, 1.0), strategy=Kept())
        train(state, Progress())
        files = state.engine.state_files()
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        comm.barrier()
        other = make_state(comm, (3.0, 1.0), strategy=Kept())
        other.engine.restore(tmp_path, {})
        return state.strategy.seen, other.strategy.seen, len(files)  # type: ignore[attr-defined]

    (first, first_again, files), (second, second_again, none) = FakeGroup(2).run(rank)
    assert files == 2 and none == 0
    assert first_again is not None and torch.equal(first, first_again)
    assert second_again is not None and torch.equal(second, second_again)
    assert not torch.equal(first, second)
    alone = make_state(SoloCommunicator(), strategy=Kept())
    alone.engine.restore(tmp_path, {})
    assert alone.strategy.seen is None  # type: ignore[attr-defined]
    alone.strategy.load_state_dict({"seen": first})  # type: ignore[attr-defined]
    alone.engine.forget()
    assert alone.strategy.seen is None  # type: ignore[attr-defined]

"""Local steps and syncs between threads: what is averaged, when, and what ranks learn of each other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import FakeCommunicator, FakeGroup
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.balancing.scheduler import SchedulerSettings
from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.summation import Summation
from hetexp.data.loader import read_ahead
from hetexp.data.sampler import Position
from hetexp.optimizer.build import build_schedule
from hetexp.strategy.independent import Independent
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.local_sgd.outer import OuterStep
from hetexp.training.balancer import SPLITS_FILE
from hetexp.training.loop import Outcome, train
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.nonfinite.loss_scale import NonFiniteError
from hetexp.training.recovery.oom_recovery import DeviceMemoryError
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]
IGNORED = -100


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save nothing: what checkpoints hold is tested elsewhere."""
    monkeypatch.setattr("hetexp.training.loop.save", lambda *_, **__: None)


def flat(state: TrainState) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in state.model.parameters()])


def run(
    make_state: MakeState,
    weights: Sequence[float],
    strategy: Callable[[], Any],
    prepare: Callable[[TrainState], None] | None = None,
    **options: Any,
) -> list[tuple[TrainState, Outcome]]:
    """Train on as many threads as there are weights."""

    def rank(comm: Communicator) -> tuple[TrainState, Outcome]:
        state = make_state(comm, weights, strategy=strategy(), **options)
        if prepare is not None:
            prepare(state)
        return state, train(state, Progress())

    return FakeGroup(len(weights)).run(rank)


def with_adam(state: TrainState) -> None:
    state.optimizer = torch.optim.Adam(state.model.parameters(), lr=0.05)
    state.schedule = build_schedule(state.optimizer, "constant", 0, state.total_steps)


# ---------------------------------------------------------------- what a sync makes of the weights


@pytest.mark.parametrize("masked", [False, True])
def test_a_sync_after_each_step_is_the_step_of_all(make_state: MakeState, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(4, (24, 5), generator=generator)
    if masked:
        targets[torch.rand(24, 5, generator=generator) < 0.6] = IGNORED
    data = TensorDataset(torch.randn(24, 5, 3, generator=generator), targets)
    common: dict[str, Any] = {"precision": "float64", "max_steps": 7, "train": data}
    one = make_state(SoloCommunicator(), **common)
    reference = train(one, Progress())
    ranks = run(make_state, [5, 2, 1], lambda: LocalSGD(sync_every=1), **common)
    for parts, outcome in ranks:
        assert float((flat(parts) - flat(one)).norm() / flat(one).norm()) < 1e-12
        assert outcome.train_loss == pytest.approx(reference.train_loss, rel=1e-12)


def test_later_rounds_average_what_went_before(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 41: rounds 2 and 3, Adam, two ranks; the iterator of the first round must not be used up."""
    before: dict[tuple[int, int], torch.Tensor] = {}
    after: dict[tuple[int, int], torch.Tensor] = {}
    real = OuterStep.step
    rounds: dict[int, int] = {}

    def watched(self: OuterStep, weight: float) -> None:
        rank = self._communicator.rank
        rounds[rank] = rounds.get(rank, 0) + 1
        values = [p.detach().reshape(-1) for p in self._model.parameters()]
        before[rank, rounds[rank]] = torch.cat(values).clone()
        assert weight == pytest.approx([0.75, 0.25][rank])
        real(self, weight)
        after[rank, rounds[rank]] = torch.cat([p.detach().reshape(-1) for p in self._model.parameters()])

    monkeypatch.setattr(OuterStep, "step", watched)
    ranks = run(
        make_state, [6, 2], lambda: LocalSGD(sync_every=4), with_adam, precision="float64", max_steps=12
    )
    assert rounds == {0: 3, 1: 3}
    for number in (1, 2, 3):
        mean = 0.75 * before[0, number] + 0.25 * before[1, number]
        assert not torch.allclose(before[0, number], before[1, number])
        torch.testing.assert_close(after[0, number], mean, rtol=1e-13, atol=1e-14)
        assert torch.equal(after[0, number], after[1, number])
    for parts, _ in ranks:  # kept: each has taken its own 12 steps, and has its own moments
        assert all(float(state["step"]) == 12 for state in parts.optimizer.state.values())
    moments = [next(iter(parts.optimizer.state.values()))["exp_avg"] for parts, _ in ranks]
    assert not torch.equal(moments[0], moments[1])


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_step_is_sgd(make_state: MakeState, nesterov: bool) -> None:
    """DiLoCo's outer optimizer against torch's own, over three rounds."""
    settings = LocalSGD(sync_every=1, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=nesterov)
    model = nn.Linear(3, 2, dtype=torch.float64)
    outer = OuterStep(model, settings, SoloCommunicator(), Summation(None))
    twin = [p.detach().clone().requires_grad_() for p in model.parameters()]
    sgd = torch.optim.SGD(twin, lr=0.7, momentum=0.9, nesterov=nesterov)
    for number in range(3):
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), twin, strict=True):
                moved = torch.full_like(parameter, 0.1 * (number + 1)) * parameter
                other.grad = moved.clone()  # θ_start − θ
                parameter.sub_(moved)
        outer.step(1.0)
        sgd.step()
        for parameter, other in zip(model.parameters(), twin, strict=True):
            torch.testing.assert_close(parameter.detach(), other.detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("steps", "syncs"), [(3, 1), (6, 2), (8, 2)])
def test_the_last_step_ends_in_a_sync(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, steps: int, syncs: int
) -> None:
    """Also if the steps are no multiple of `sync_every`: the ranks end with one model."""
    taken: list[int] = []
    real = OuterStep.step

    def counted(self: OuterStep, weight: float) -> None:
        taken.append(self._communicator.rank)
        real(self, weight)

    monkeypatch.setattr(OuterStep, "step", counted)
    ranks = run(make_state, [6, 2], lambda: LocalSGD(sync_every=4), with_adam, max_steps=steps)
    assert sorted(taken) == [0] * syncs + [1] * syncs
    assert torch.equal(flat(ranks[0][0]), flat(ranks[1][0]))


class _Counting(nn.Module):
    """Has every kind of state: trained, frozen, running statistics, counters, flags, a constant infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 4)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.mask: torch.Tensor
        self.flag: torch.Tensor
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("number", torch.tensor(7))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(inputs))  # type: ignore[no-any-return]


def test_buffers_and_frozen_parameters(make_state: MakeState) -> None:
    def prepare(state: TrainState) -> None:
        model: Any = state.model
        model.flag.fill_(state.rank == 0)
        model.number.fill_(7 - state.rank)
        model.norm.num_batches_tracked.fill_(10 * state.rank)

    statistics: dict[int, torch.Tensor] = {}
    real = OuterStep.step

    def watched(self: OuterStep, weight: float) -> None:
        model: Any = self._model
        statistics[self._communicator.rank] = weight * model.norm.running_mean.clone()
        assert sum(p.numel() for p in self._trained) == 22  # the frozen five do not travel
        real(self, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OuterStep, "step", watched)
        torch.manual_seed(0)
        model = _Counting()
        state = model.state_dict()

        def own_model() -> _Counting:
            fresh = _Counting()
            fresh.load_state_dict(state)
            return fresh

        def rank(comm: Communicator) -> TrainState:
            state = make_state(comm, [6, 2], strategy=LocalSGD(sync_every=2), model=own_model(), max_steps=2)
            prepare(state)
            train(state, Progress())
            return state

        ranks = FakeGroup(2).run(rank)
    for parts in ranks:
        merged: Any = parts.model
        torch.testing.assert_close(merged.norm.running_mean, statistics[0] + statistics[1])
        assert int(merged.norm.num_batches_tracked) == 12  # the largest: 10 + 2 batches
        assert merged.flag.tolist() == [True, True]
        assert int(merged.number) == 7
        assert merged.mask.tolist() == [0.0, -math.inf]
        assert torch.equal(merged.frozen, torch.ones(5))
    assert torch.equal(flat(ranks[0]), flat(ranks[1]))


@pytest.mark.parametrize("policy", ["average", "reset"])
def test_moments_as_asked(make_state: MakeState, policy: Any) -> None:
    ranks = run(
        make_state,
        [6, 2],
        lambda: LocalSGD(sync_every=3, inner_state=policy),
        with_adam,
        precision="float64",
        max_steps=6,
    )
    states = [list(parts.optimizer.state.values()) for parts, _ in ranks]
    if policy == "reset":
        assert states == [[], []]
        return
    for one, other in zip(*states, strict=True):
        assert torch.equal(one["exp_avg"], other["exp_avg"])
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])
        assert float(one["step"]) == float(other["step"]) == 6
        assert bool((one["exp_avg_sq"] >= 0).all())


@pytest.mark.parametrize(("local_batch_size", "steps"), [(None, [3, 1]), (1, [6, 2])])
def test_speed_takes_as_many_steps_as_the_share_allows(
    make_state: MakeState, local_batch_size: int | None, steps: list[int]
) -> None:
    strategy = LocalSGD(sync_every=2, local_steps="speed", local_batch_size=local_batch_size)
    ranks = run(make_state, [6, 2], lambda: strategy, with_adam, max_steps=2, accumulate=2)
    for (parts, _), number in zip(ranks, steps, strict=True):
        assert {int(state["step"]) for state in parts.optimizer.state.values()} == {2 * number}
    assert torch.equal(flat(ranks[0][0]), flat(ranks[1][0]))


def test_speed_cuts_consecutive_pieces(make_state: MakeState) -> None:
    """Three steps of plain SGD on consecutive thirds of the slice, done by hand."""
    state = make_state(SoloCommunicator(), strategy=LocalSGD(local_steps="speed", local_batch_size=3))
    twin = nn.Linear(3, 4)
    twin.load_state_dict(state.model.state_dict())
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    indices, _ = state.sampler.batch(Position())
    for piece in (indices[:3], indices[3:6], indices[6:]):
        inputs, targets = state.train_data[piece.tolist()]
        sgd.zero_grad()
        nn.functional.cross_entropy(twin(inputs), targets).backward()
        sgd.step()
    state.total_steps = 1
    train(state, Progress())
    for one, other in zip(state.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach())


def test_an_empty_share_follows(make_state: MakeState) -> None:
    ranks = run(make_state, [8, 0], lambda: LocalSGD(sync_every=2), with_adam, max_steps=4)
    assert torch.equal(flat(ranks[0][0]), flat(ranks[1][0]))
    assert not ranks[1][0].optimizer.state


# ---------------------------------------------------------------- communication


def test_nothing_is_exchanged_between_syncs(make_state: MakeState, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = FakeCommunicator.all_reduce_async
    step = [0]

    def counted(self: FakeCommunicator, tensor: torch.Tensor, op: Any = "sum") -> Any:
        if self.rank == 0:
            calls.append(step[0])
        return real(self, tensor, op)

    monkeypatch.setattr(FakeCommunicator, "all_reduce_async", counted)

    def prepare(state: TrainState) -> None:
        if state.rank == 0:
            state.backend.begin_step = lambda number: step.__setitem__(0, number + 1)  # type: ignore[assignment,method-assign]

    run(make_state, [6, 2], lambda: LocalSGD(sync_every=4), prepare, max_steps=8, log_every=8)
    assert set(calls) == {0, 4, 8}  # the start, two syncs, the log line and the end


# ---------------------------------------------------------------- what goes wrong


def poison(step: int, rank: int, value: float = math.inf) -> Callable[[TrainState], None]:
    """Let the gradient of one step of one rank not be finite."""

    def prepare(state: TrainState) -> None:
        if state.rank != rank:
            return
        begin = state.backend.begin_step
        now = [0]

        def begun(number: int) -> None:
            begin(number)
            now[0] = number + 1

        state.backend.begin_step = begun  # type: ignore[assignment,method-assign]
        weight = next(state.model.parameters())
        weight.register_hook(lambda g: torch.full_like(g, value) if now[0] == step else g)

    return prepare


def test_a_step_that_is_not_finite_is_left_out_on_its_device(make_state: MakeState) -> None:
    """Case 9: an infinity on rank 1 in step 3 of 4."""
    ranks = run(
        make_state,
        [4, 4],
        lambda: LocalSGD(sync_every=4),
        poison(3, 1),
        max_steps=8,
        non_finite="skip",
        precisions=("float32", "float16"),
    )
    assert torch.equal(flat(ranks[0][0]), flat(ranks[1][0]))
    assert bool(flat(ranks[0][0]).isfinite().all())
    for parts, outcome in ranks:
        assert outcome.progress.step == 8
        assert outcome.progress.skipped_steps == 1
        assert parts.loss_scale is not None
        assert parts.loss_scale.value == 2.0**15  # the smallest of all, halved once


def test_all_stop_before_harm_is_averaged(make_state: MakeState) -> None:
    messages: list[str] = []
    values: list[torch.Tensor] = []

    def rank(comm: Communicator) -> None:
        state = make_state(comm, [4, 4], strategy=LocalSGD(sync_every=4), max_steps=8)
        poison(3, 1)(state)
        progress = Progress()
        with pytest.raises(NonFiniteError) as caught:
            train(state, progress)
        assert progress.step == 3  # three steps are done, and the fourth ends in the sync
        messages.append(f"{caught.value}")
        values.append(flat(state))

    FakeGroup(2).run(rank)
    assert messages[0] == messages[1]
    assert messages[0].startswith("The gradient of step 3 on rank 1, cpu:1")
    assert "No weights were averaged" in messages[0]
    assert all(bool(value.isfinite().all()) for value in values)


def test_apart_a_rank_stops_by_itself(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator(), strategy=Independent(), max_steps=4)
    poison(2, 0)(state)
    with pytest.raises(NonFiniteError, match="step 2 on rank 0"):
        train(state, Progress())


class _Hungry(nn.Module):
    """Runs out of memory with more than so many samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(3, 4), most

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("no memory")
        return self.linear(inputs)  # type: ignore[no-any-return]


def test_a_rank_halves_its_own_microbatch_and_all_learn_of_it(make_state: MakeState) -> None:
    def rank(comm: Communicator) -> TrainState:
        torch.manual_seed(0)
        hungry = _Hungry(2 if comm.rank == 0 else 8)
        state = make_state(comm, [6, 2], strategy=LocalSGD(sync_every=2), model=hungry, max_steps=2)
        train(state, Progress())
        return state

    ranks = FakeGroup(2).run(rank)
    assert [state.microbatch_limits for state in ranks] == [[2, None]] * 2
    assert torch.equal(flat(ranks[0]), flat(ranks[1]))


def test_where_a_single_sample_does_not_fit_the_run_ends(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator(), strategy=LocalSGD(sync_every=2), model=_Hungry(0))
    with pytest.raises(DeviceMemoryError, match="ran out of memory in step 1"):
        train(state, Progress())


# ---------------------------------------------------------------- shares that follow


def test_shares_follow_at_syncs_only(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks_of: dict[int, int] = {}
    seconds = {0: 0.3, 1: 0.1}
    monkeypatch.setattr(StepTimer, "since_last", lambda self: seconds[ranks_of[id(self.backend)]])

    def prepare(state: TrainState) -> None:
        ranks_of[id(state.backend)] = state.rank

    follow = SchedulerSettings()
    ranks = run(make_state, [4, 4], lambda: LocalSGD(sync_every=4), prepare, max_steps=12, follow=follow)
    changes = [json.loads(line) for line in (tmp_path / SPLITS_FILE).read_text().splitlines()]
    assert changes[0]["counts"] == [2, 6]  # by three times its speed
    ahead = read_ahead(ranks[0][0].train_data, 0)
    # The first step after a sync that no loader has drawn yet.
    assert all(change["step"] % 4 == ahead for change in changes)
    assert [parts.balancer.num_changes for parts, _ in ranks] == [len(changes)] * 2
    assert ranks[0][0].balancer.split(11, 8) == ranks[1][0].balancer.split(11, 8)

"""A step on unequal shares is the step of one device on all samples; the rest is agreed on by all ranks."""

from __future__ import annotations

import json
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fake_ranks import FakeGroup
from one_by_one import OneByOne
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.checkpoint.manifest import search_checkpoint
from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.step_message import StepMessage
from hetexp.core.split import Split
from hetexp.data.loader import LocalBatch, chop, cut
from hetexp.data.prefetch import InWaits
from hetexp.data.sampler import Position
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.strategy.independent import Independent
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.training import loop, replica
from hetexp.training.engine import StepResult
from hetexp.training.evaluate import evaluate as evaluated
from hetexp.training.gradient import NO_SAMPLES
from hetexp.training.loop import MetricsWindow, Outcome, should_stop, train
from hetexp.training.loss import CrossEntropy
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.saving import save as saving
from hetexp.training.saving.random_states import local_states
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]
IGNORED = -100


def batch_of(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (count,), generator=generator)


def local_part(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    split: Split,
    rank: int,
    accumulate: int = 1,
    size: int | None = None,
) -> LocalBatch:
    """Cut one rank's microbatches out of a global batch."""
    start, end = split.bounds(rank)
    pieces = chop(range(start, end), cut(end - start, accumulate, size))
    return LocalBatch(
        microbatches=[(inputs[piece], targets[piece]) for piece in pieces],
        local_samples=end - start,
        global_samples=len(inputs),
        position=Position(0, len(inputs)),
    )


class Step:
    """What one optimizer step did on every rank."""

    def __init__(
        self,
        make_state: MakeState,
        counts: Sequence[int],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        size: int | None = None,
        **options: Any,
    ) -> None:
        self.exchanges: list[int] = []
        self.lost_sum = 0.0

        def rank(comm: Communicator) -> tuple[list[torch.Tensor], Any, float]:
            state = make_state(comm, counts, precision="float64", microbatch_size=size, **options)
            gradient_divisor = state.strategy.gradient_divisor(comm.world_size)
            normalizer = LossNormalizer(StepMessage(comm), gradient_divisor, state.config.debug.normalizer)
            accumulate = state.config.trainer.accumulate
            part = local_part(inputs, targets, Split(tuple(counts)), comm.rank, accumulate, size)
            meter = StepTimer(state.backend)
            result = state.engine.step(0, part, normalizer, meter)
            self.exchanges.append(cast(Any, state.strategy).exchanges)
            assert meter.samples == counts[comm.rank]
            gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
            assert len(gradients) == 2
            values = [p.detach().clone() for p in state.model.parameters()]
            return [*gradients, *values], result, float(comm.all_reduce(result.loss_sum))

        ranks = FakeGroup(len(counts)).run(rank)
        self.tensors = [tensors for tensors, _, _ in ranks]
        """Gradients and new parameters of each rank."""
        self.results = [result for _, result, _ in ranks]
        self.loss = ranks[0][2] / max(self.results[0].global_count, 1)


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- the exact gradient


@pytest.mark.parametrize("counts", [[6, 2], [7, 1], [5, 2, 1], [8, 0], [0, 8], [3, 0, 5], [1, 1, 1, 5]])
def test_unequal_shares_give_the_gradient_of_the_whole_batch(
    make_state: MakeState, counts: list[int]
) -> None:
    inputs, targets = batch_of(8)
    whole = Step(make_state, [8], inputs, targets)
    step = Step(make_state, counts, inputs, targets)
    for tensors in step.tensors:
        assert_same(tensors, whole.tensors[0])
    assert step.loss == pytest.approx(whole.loss, rel=1e-12)
    assert {result.global_count for result in step.results} == {8}


def test_without_the_weighting_the_gradient_is_wrong(make_state: MakeState) -> None:
    inputs, targets = batch_of(8)
    whole = Step(make_state, [8], inputs, targets)
    naive = Step(make_state, [6, 2], inputs, targets, normalizer="per_rank")
    assert not torch.allclose(naive.tensors[0][0], whole.tensors[0][0], rtol=1e-3, atol=1e-3)
    equal = Step(make_state, [4, 4], inputs, targets, normalizer="per_rank")
    assert_same(equal.tensors[0], whole.tensors[0])  # on equal shares it is what everybody does


def test_nobody_holds_the_output_while_backward_runs(make_state: MakeState) -> None:
    held: list[Any] = []

    class Watched(CrossEntropy):
        def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            held.append(weakref.ref(output))
            return output.sum()  # its gradient needs no values

    state = make_state(SoloCommunicator())
    state.loss = Watched()
    alive: list[bool] = []
    state.parameters[0].register_hook(lambda _: alive.append(held[-1]() is not None))
    train(state, Progress())
    assert alive == [False] * 3


def test_a_step_without_the_exchange_leaves_each_rank_its_own_gradient(make_state: MakeState) -> None:
    inputs, targets = batch_of(8)
    whole = Step(make_state, [6, 2], inputs, targets)
    apart = Step(make_state, [6, 2], inputs, targets, exchange=False)
    assert apart.exchanges == [0, 0]
    assert_same(
        [(a + b) / 2 for a, b in zip(*(one[:2] for one in apart.tensors), strict=True)], whole.tensors[0][:2]
    )
    assert not torch.allclose(apart.tensors[0][0], whole.tensors[0][0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("counts", [[8], [4, 4], [6, 2], [0, 8]])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_what_counts_is_weighted_not_samples(
    make_state: MakeState, counts: list[int], accumulate: int
) -> None:
    inputs, targets = batch_of(8)
    targets[1:7] = IGNORED  # all that counts is at the two ends
    model = nn.Linear(3, 4, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).reshape(parameter.shape))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    step = Step(make_state, counts, inputs, targets, accumulate=accumulate)
    for tensors in step.tensors:
        assert_same(tensors[:2], [p.grad for p in model.parameters() if p.grad is not None])
    assert {result.global_count for result in step.results} == {2}


def test_a_batch_in_which_nothing_counts_changes_nothing(make_state: MakeState) -> None:
    inputs, targets = batch_of(4)
    step = Step(make_state, [3, 1], inputs, torch.full_like(targets, IGNORED))
    before = [p.detach() for p in make_state(SoloCommunicator(), precision="float64").model.parameters()]
    for tensors in step.tensors:
        assert all(torch.count_nonzero(gradient) == 0 for gradient in tensors[:2])
        assert_same(tensors[2:], before)
    assert step.results[0].global_count == 0
    assert float(step.results[0].loss_sum) == 0.0


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_may_differ_in_their_number_of_microbatches(make_state: MakeState, size: int) -> None:
    inputs, targets = batch_of(8)
    whole = Step(make_state, [8], inputs, targets)
    step = Step(make_state, [6, 2], inputs, targets, size=size)
    for tensors in step.tensors:
        assert_same(tensors, whole.tensors[0])
    assert step.exchanges == [1, 1]  # one exchange a step, whatever the pieces


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("counts", [[6, 2], [8, 0]])
def test_accumulation_does_not_change_the_step(
    make_state: MakeState, counts: list[int], accumulate: int
) -> None:
    inputs, targets = batch_of(8)
    whole = Step(make_state, [8], inputs, targets)
    step = Step(make_state, counts, inputs, targets, accumulate=accumulate)
    for tensors in step.tensors:
        assert_same(tensors, whole.tensors[0])
    assert step.exchanges == [1, 1]


def test_gradients_do_not_outlive_a_step(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator(), precision="float64", learning_rate=1e-30)
    inputs, targets = batch_of(8)
    normalizer = LossNormalizer(StepMessage(state.communicator), 1)
    gradients = []
    for _ in range(2):
        part = local_part(inputs, targets, Split((8,)), 0)
        state.engine.step(0, part, normalizer, StepTimer(state.backend))
        assert state.model.weight.grad is not None
        gradients.append(cast(torch.Tensor, state.model.weight.grad).clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- clipping (case 7)


def gradient_norm(step: Step) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in step.tensors[0][:2]))


@pytest.mark.parametrize("counts", [[8], [6, 2], [8, 0], [5, 2, 1]])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_sees_the_gradient_of_the_whole_batch(
    make_state: MakeState, counts: list[int], accumulate: int
) -> None:
    inputs, targets = batch_of(8)
    plain = Step(make_state, [8], inputs, targets)
    norm = gradient_norm(plain)
    loose = Step(make_state, counts, inputs, targets, accumulate=accumulate, clip_norm=norm * 1.25)
    tight = Step(make_state, counts, inputs, targets, accumulate=accumulate, clip_norm=norm / 4)
    reference = Step(make_state, [8], inputs, targets, clip_norm=norm / 4)
    for rank in range(len(counts)):
        assert_same(loose.tensors[rank], plain.tensors[0])
        assert_same(tight.tensors[rank], reference.tensors[0])
        for step in (loose, tight):  # the norm is told as it was before clipping
            assert float(step.results[rank].grad_norm) == pytest.approx(norm, rel=1e-9)
    assert gradient_norm(tight) == pytest.approx(norm / 4, rel=1e-4)


def test_no_clipping_no_norm(make_state: MakeState) -> None:
    inputs, targets = batch_of(4)
    assert Step(make_state, [4], inputs, targets).results[0].grad_norm is None


def test_the_learning_rate_told_is_the_one_used(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator(), schedule="linear", total_steps=4, precision="float64")
    normalizer = LossNormalizer(StepMessage(state.communicator), 1)
    part = local_part(*batch_of(8), Split((8,)), 0)
    used = [state.engine.step(0, part, normalizer, StepTimer(state.backend)).learning_rate for _ in range(4)]
    assert used == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_a_rank_without_samples_has_one_empty_microbatch() -> None:
    assert NO_SAMPLES == (None, None)
    assert local_part(*batch_of(8), Split((8, 0)), 1).microbatches == []


# ---------------------------------------------------------------- train


def lines(state: TrainState) -> list[tuple[int, dict[str, Any]]]:
    recorded: list[tuple[int, dict[str, Any]]] = cast(Any, state.loggers[0]).lines
    return recorded


def train_on(
    make_state: MakeState, weights: Sequence[float], progress: Progress | None = None, **options: Any
) -> list[tuple[TrainState, Outcome]]:
    def rank(comm: Communicator) -> tuple[TrainState, Outcome]:
        state = make_state(comm, weights, **options)
        start = Progress(**vars(progress)) if progress else Progress()
        return state, train(state, start)

    return FakeGroup(len(weights)).run(rank)


def parameters(state: TrainState) -> list[torch.Tensor]:
    return [p.detach() for p in state.model.parameters()]


@pytest.mark.parametrize("weights", [[3.0, 1.0], [1.0, 0.0], [0.8, 0.15, 0.05]])
def test_a_run_on_unequal_ranks_is_the_run_of_one(make_state: MakeState, weights: list[float]) -> None:
    inputs, targets = batch_of(11)
    options: dict[str, Any] = {
        "train": TensorDataset(inputs, targets),
        "evaluation": TensorDataset(inputs, targets),
        "precision": "float64",
        "max_steps": 5,  # 8 + 3 samples an epoch: short batches in which a share is empty
        "log_every": 2,
    }
    ((one, outcome),) = train_on(make_state, [1.0], **options)
    several = train_on(make_state, weights, **options)
    for parts, theirs in several:
        assert_same(parameters(parts), parameters(one))
        assert theirs.train_loss == pytest.approx(outcome.train_loss, rel=1e-12)
        assert theirs.evaluation is not None
        assert outcome.evaluation is not None
        assert theirs.evaluation["accuracy"] == outcome.evaluation["accuracy"]
        assert theirs.evaluation == several[0][1].evaluation
        assert (theirs.progress.step, theirs.progress.samples) == (5, 8 + 3 + 8 + 3 + 8)
        assert theirs.progress.position == Position(2, 8)
    assert sum(theirs.totals.local_samples for _, theirs in several) == 30
    assert {theirs.totals.global_samples for _, theirs in several} == {30}


def test_lines_are_written_when_asked_for(make_state: MakeState) -> None:
    ((state, outcome),) = train_on(
        make_state, [1.0], max_steps=5, log_every=2, eval_every=4, evaluation=_small()
    )
    kinds = [(step, sorted({name.partition("/")[0] for name in line})) for step, line in lines(state)]
    training = ["balancing", "device", "samples_per_second", "step_seconds", "train"]
    assert kinds == [(2, training), (4, training), (4, ["eval"]), (5, training), (5, ["eval"])]
    assert outcome.train_loss == lines(state)[-2][1]["train/loss"]
    assert outcome.evaluation == {
        "loss": lines(state)[-1][1]["eval/loss"],
        "samples": 5.0,
        "accuracy": lines(state)[-1][1]["eval/accuracy"],
    }
    assert outcome.totals.steps == 5
    assert not outcome.stopped_early


def _small() -> TensorDataset:
    inputs, targets = batch_of(5, seed=7)
    return TensorDataset(inputs.float(), targets)


def test_an_evaluation_is_not_repeated_at_the_end(make_state: MakeState) -> None:
    ((state, _),) = train_on(make_state, [1.0], max_steps=4, eval_every=2, evaluation=_small())
    assert [step for step, line in lines(state) if "eval/loss" in line] == [2, 4]


def test_checkpoints_are_written_by_rank_0_when_asked_for(make_state: MakeState, tmp_path: Path) -> None:
    ranks = train_on(make_state, [1.0, 1.0], max_steps=5, checkpoint_every=2)
    folders = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert [int(name.rpartition("_")[2]) for name in folders] == [2, 4, 5]
    assert ranks[0][1].checkpoint == str(tmp_path / "checkpoints" / folders[-1])
    assert ranks[1][1].checkpoint is None
    state = json.loads((tmp_path / "checkpoints" / folders[-1] / "state.json").read_text())
    assert state["extra"]["progress"]["samples"] == 40


def manifests(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what each checkpoint's manifest says of its evaluation, by step."""
    found = [json.loads(path.read_text()) for path in (folder / "checkpoints").glob("step_*/manifest.json")]
    return {one["step"]: one.get("evaluation") for one in sorted(found, key=lambda one: one["step"])}


@pytest.mark.parametrize("eval_every", [0, 2])
def test_the_last_evaluation_comes_after_the_last_checkpoint_and_into_it(
    make_state: MakeState, tmp_path: Path, eval_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 62; whether it makes this checkpoint the best is told by then."""
    there: list[list[int]] = []

    def evaluate(state: TrainState) -> dict[str, float]:
        there.append(list(manifests(tmp_path)))
        return evaluated(state)

    monkeypatch.setattr(replica, "evaluate", evaluate)
    options: dict[str, Any] = {
        "eval_every": eval_every,
        "checkpoint_every": 2,
        "checkpoint_in_background": False,
    }
    inputs, targets = batch_of(16, seed=7)  # what it learns
    data = TensorDataset(inputs.float(), targets)
    ((state, outcome),) = train_on(
        make_state, [1.0], max_steps=6, train=data, evaluation=data, keep_last=1, keep_best=1, **options
    )
    assert there[-1][-1] == 6
    assert outcome.evaluation is not None
    assert manifests(tmp_path) == {6: outcome.evaluation}  # the older best one is gone
    assert search_checkpoint(tmp_path / "checkpoints", contents=True)[1] == ()


def test_a_checkpoint_has_what_early_stopping_keeps_of_its_step(
    make_state: MakeState, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"early_stopping": {"patience": 5}, "eval_every": 2, "evaluation": _small()}
    ((_, outcome),) = train_on(make_state, [1.0], max_steps=4, **options)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert outcome.progress.best is not None
    saved = json.loads((folder / "state.json").read_text())["extra"]["progress"]
    assert saved == outcome.progress.to_dict()
    assert manifests(tmp_path) == {4: outcome.evaluation}


class ClockOfEachRank:
    """Stands in for the `time` module: each thread turns a clock of its own."""

    def __init__(self) -> None:
        self.of = threading.local()

    def perf_counter(self) -> float:
        return float(self.of.now)


def saved_by_the_clock(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, make_strategy: Callable[[], Any], **options: Any
) -> list[list[tuple[int, bool]]]:
    """Train 11 steps of 150 s by rank 0's clock, of which rank 1's thinks differently.

    Returns:
        The steps that each rank saved, and whether only because of the time.
    """
    clock = ClockOfEachRank()
    monkeypatch.setattr(loop, "time", clock)

    def save(state: TrainState, progress: Progress, scores: Any, wait: bool, timed: bool) -> str | None:
        clock.of.saved.append((progress.step, timed))
        return saving.save(state, progress, scores, True, timed)

    monkeypatch.setattr(loop, "save", save)

    def rank(comm: Communicator) -> list[tuple[int, bool]]:
        clock.of.now, clock.of.saved = 0.0, []
        given = {"max_steps": 11, "log_every": 1, "checkpoint_minutes": 5, **options}
        state = make_state(comm, [1.0, 1.0], strategy=make_strategy(), **given)

        def take_time(*_: Any) -> None:
            clock.of.now += (150.0, 1e6)[comm.rank]

        state.model.register_forward_pre_hook(take_time)
        train(state, Progress())
        return list(clock.of.saved)

    return FakeGroup(2).run(rank)


@pytest.mark.parametrize(
    ("make_strategy", "timed", "kept"),
    [
        (lambda: None, [3, 6, 9], [9, 11]),
        (lambda: LocalSGD(sync_every=3), [3, 6, 9], [9, 11]),  # the common steps that follow
        (lambda: Independent(merge=False), [2, 4, 6, 8, 10], [8, 10, 11]),  # a rank may be one behind
    ],
    ids=["joint", "local_sgd", "independent"],
)
def test_a_checkpoint_is_saved_when_the_first_ranks_clock_asks_for_it(
    make_state: MakeState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_strategy: Callable[[], Any],
    timed: list[int],
    kept: list[int],
) -> None:
    ranks = saved_by_the_clock(make_state, monkeypatch, make_strategy)
    assert ranks[0] == ranks[1] == [*((step, True) for step in timed), (11, False)]
    for folder in {path.parent for path in (tmp_path / "checkpoints").rglob("step_*")}:
        assert sorted(int(path.name[5:]) for path in folder.glob("step_*")) == kept


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"checkpoint_minutes": 0}, [(11, False)]),
        # Those that are asked for count, too: another one is due only where none comes for so long.
        ({"checkpoint_every": 2}, [(step, False) for step in (2, 4, 6, 8, 10, 11)]),
        ({"checkpoint_every": 4}, [(3, True), (4, False), (7, True), (8, False), (11, False)]),
        ({"fast_dev_run": 11, "max_steps": None}, []),
    ],
)
def test_how_the_clock_goes_with_what_is_asked_for(
    make_state: MakeState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    saved: list[tuple[int, bool]],
) -> None:
    ranks = saved_by_the_clock(make_state, monkeypatch, lambda: None, **options)
    assert ranks == [saved, saved]
    there = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step_*"))
    assert there == [step for step, timed in saved if not timed]  # newer ones took the others' place


def test_a_fast_run_writes_no_checkpoint(make_state: MakeState, tmp_path: Path) -> None:
    ((_, outcome),) = train_on(make_state, [1.0], fast_dev_run=2, evaluation=_small())
    assert outcome.progress.step == 2
    assert outcome.checkpoint is None
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_goes_on_where_it_stood(make_state: MakeState) -> None:
    options: dict[str, Any] = {"precision": "float64", "total_steps": 6, "max_steps": 6}
    ((whole, _),) = train_on(make_state, [1.0], **options)
    ((half, first),) = train_on(make_state, [1.0], precision="float64", max_steps=2)
    model = nn.Linear(3, 4, dtype=torch.float64)
    model.load_state_dict(half.model.state_dict())
    ((second, outcome),) = train_on(make_state, [1.0], first.progress, model=model, **options)
    assert_same(parameters(second), parameters(whole))
    assert outcome.progress.step == 6
    assert outcome.totals.steps == 4  # of this run


def test_a_finished_run_has_nothing_left_to_do(make_state: MakeState) -> None:
    done = Progress(step=3, position=Position(1, 0), samples=24)
    ((state, outcome),) = train_on(make_state, [1.0], done, max_steps=3, evaluation=_small())
    assert outcome.totals.steps == 0
    assert outcome.train_loss is None
    assert outcome.evaluation is not None
    assert [sorted(line) for _, line in lines(state)] == [["eval/accuracy", "eval/loss", "eval/samples"]]


# ---------------------------------------------------------------- what a line tells


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.now = 50.0

    def perf_counter(self) -> float:
        return self.now


class ClockBackend(CpuBackend):
    """Reads the tests' clock."""

    def __init__(self, clock: Clock, rank: int = 0) -> None:
        super().__init__(CpuBackend.describe(rank))
        self.clock = clock

    def mark(self) -> float:
        return self.clock.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(loop, "time", fake)
    return fake


def result(
    loss_sum: float, count: int, norm: float | None = None, local_count: int | None = None
) -> StepResult:
    total, grad_norm = torch.tensor(loss_sum), None if norm is None else torch.tensor(norm)
    return StepResult(
        total, count, grad_norm, 0.05, local_count=count if local_count is None else local_count
    )


def batch(local: int, in_all: int) -> LocalBatch:
    return LocalBatch([], local, in_all, Position(0, in_all))


def test_contents_of_a_line(make_state: MakeState, clock: Clock) -> None:
    state = make_state(SoloCommunicator())
    state.backend = ClockBackend(clock)
    window = MetricsWindow(state)
    window.restart()
    for loss_sum in (12.0, 4.0):
        window.meter.span(clock.now, clock.now + 1.5)
        clock.now += 2.0
        window.meter.samples += 8
        window.add(result(loss_sum, 8, norm=3.0), batch(8, 8))
    loss = window.log(Progress(step=2, position=Position(4, 8), samples=16))
    ((step, line),) = lines(state)
    assert step == 2
    assert loss == line["train/loss"] == 1.0
    assert 0.01 < line.pop("device/cpu:0/peak_memory_gib") < 1000  # of this process
    assert line == {
        "train/loss": 1.0,
        "train/learning_rate": 0.05,
        "train/epoch": 4,
        "train/samples": 16,
        "train/grad_norm": 3.0,
        "samples_per_second": 4.0,
        "step_seconds": 2.0,
        "balancing/weight/cpu:0": 1.0,
        "device/cpu:0/share": 1.0,
        "device/cpu:0/samples_per_second": 16 / 3.0,
    }
    totals = window.totals
    assert (totals.train_seconds, totals.compute_seconds, totals.steps) == (4.0, 3.0, 2)
    assert (totals.local_samples, totals.global_samples) == (16, 16)
    assert totals.after_warmup is totals  # nothing came after the first line


def test_a_line_tells_what_a_step_was_predicted_to_take(make_state: MakeState, clock: Clock) -> None:
    state = make_state(SoloCommunicator())
    state.plan = replace(state.plan, calibration={"predicted_step_seconds": 0.5})
    state.time_scale = 4.0  # a modelled second takes four
    window = MetricsWindow(state)
    window.add(result(1.0, 8), batch(8, 8))
    clock.now += 1.0
    window.log(Progress(step=1))
    assert lines(state)[0][1]["predicted_step_seconds"] == 2.0


def test_a_line_starts_again_from_zero(make_state: MakeState, clock: Clock) -> None:
    state = make_state(SoloCommunicator())
    state.backend = ClockBackend(clock)
    window = MetricsWindow(state)
    window.restart()
    for seconds, loss_sum in ((1.0, 80.0), (4.0, 8.0)):
        clock.now += seconds
        window.meter.samples += 8
        window.meter.span(0.0, 1.0)
        window.add(result(loss_sum, 8), batch(8, 8))
        window.log(Progress(step=1))
    (_, first), (_, second) = lines(state)
    assert (first["train/loss"], second["train/loss"]) == (10.0, 1.0)
    assert (first["step_seconds"], second["step_seconds"]) == (1.0, 4.0)
    assert "train/grad_norm" not in first
    assert window.totals.train_seconds == 5.0
    assert window.totals.steps == 2
    steady = window.totals.after_warmup
    assert (steady.train_seconds, steady.steps, steady.global_samples) == (4.0, 1, 8)


def test_what_is_not_training_takes_no_time(make_state: MakeState, clock: Clock) -> None:
    state = make_state(SoloCommunicator())
    state.backend = ClockBackend(clock)
    window = MetricsWindow(state)
    window.restart()
    clock.now += 1.0
    window.pause()
    clock.now += 100.0  # an evaluation
    window.restart()
    clock.now += 1.0
    window.meter.samples += 8
    window.meter.span(0.0, 1.0)
    window.add(result(8.0, 8), batch(8, 8))
    window.log(Progress(step=1))
    assert lines(state)[0][1]["step_seconds"] == 2.0


def test_a_line_tells_every_ranks_share_and_speed(make_state: MakeState, clock: Clock) -> None:
    seconds = [2.0, 3.0, 0.0]

    def rank(comm: Communicator) -> tuple[float | None, list[tuple[int, dict[str, Any]]]]:
        state = make_state(comm, [6.0, 2.0, 0.0])
        state.backend = ClockBackend(clock, comm.rank)
        if comm.rank == 1:
            state.backend.peak_memory_bytes = lambda: None  # type: ignore[method-assign]
        window = MetricsWindow(state)
        window._resumed_at = 0.0
        local = (6, 2, 0)[comm.rank]
        window.meter.samples += local
        window.meter.span(0.0, seconds[comm.rank])
        window.add(result(float(comm.rank + 1), 8, local_count=local), batch(local, 8))
        loss = window.log(Progress(step=1))
        return loss, lines(state) if comm.rank == 0 else []

    ranks = FakeGroup(3).run(rank)
    assert [loss for loss, _ in ranks] == [6 / 8] * 3  # sums of all ranks ÷ the global count, on each of them
    ((_, line),) = ranks[0][1]
    assert [line[f"balancing/weight/cpu:{rank}"] for rank in range(3)] == [0.75, 0.25, 0.0]
    assert "balancing/splits" not in line
    told = {name: value for name, value in line.items() if name.startswith("device/")}
    # A device whose memory nobody counts has no line of it.
    assert {name for name in told if "memory" in name} == {f"device/cpu:{r}/peak_memory_gib" for r in (0, 2)}
    told = {name: value for name, value in told.items() if "memory" not in name}
    assert told == {
        "device/cpu:0/share": 0.75,
        "device/cpu:1/share": 0.25,
        "device/cpu:2/share": 0.0,
        "device/cpu:0/samples_per_second": 3.0,
        "device/cpu:1/samples_per_second": pytest.approx(2 / 3),
        "device/cpu:2/samples_per_second": None,
        "device/cpu:0/idle_seconds": 1.0,
        "device/cpu:1/idle_seconds": 0.0,
        "device/cpu:2/idle_seconds": 3.0,
    }
    assert line["imbalance"] == 3.0 / 2.5  # of the ranks that had work
    json.dumps(line)


def test_a_window_in_which_nothing_counts_has_no_loss(make_state: MakeState, clock: Clock) -> None:
    state = make_state(SoloCommunicator())
    window = MetricsWindow(state)
    window.restart()
    clock.now += 1.0
    window.add(result(0.0, 0), batch(8, 8))
    assert window.log(Progress(step=1)) is None
    assert lines(state)[0][1]["train/loss"] is None


# ---------------------------------------------------------------- early stopping


def decisions(state: TrainState, name: str, values: Sequence[float]) -> list[bool]:
    progress = Progress()
    return [should_stop(state, progress, {name: value}) for value in values]


def stopping(make_state: MakeState, **early: Any) -> TrainState:
    return make_state(SoloCommunicator(), eval_every=1, early_stopping=early)


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ([3.0, 2.0, 1.0, 0.5], [False] * 4),
        ([1.0, 1.0, 1.0], [False, False, True]),
        ([1.0, 2.0, 0.5, 0.6, 0.7], [False, False, False, False, True]),
        ([1.0, 1.1, 1.2], [False, False, True]),
    ],
)
def test_a_loss_that_does_not_fall(make_state: MakeState, values: list[float], stops: list[bool]) -> None:
    assert decisions(stopping(make_state, patience=2), "loss", values) == stops
    # An accuracy is better when it is higher.
    upside_down = [1 / (1 + value) for value in values]
    assert decisions(stopping(make_state, patience=2, metric="accuracy"), "accuracy", upside_down) == stops


def test_an_improvement_must_be_large_enough(make_state: MakeState) -> None:
    state = stopping(make_state, patience=1, min_delta=0.1)
    assert decisions(state, "loss", [1.0, 0.8, 0.75]) == [False, False, True]
    state = stopping(make_state, patience=1, min_delta=0.1, metric="accuracy")
    assert decisions(state, "accuracy", [0.5, 0.7, 0.75]) == [False, False, True]


def test_never_stops_without_patience_or_metric(make_state: MakeState) -> None:
    assert decisions(make_state(SoloCommunicator()), "loss", [1.0] * 5) == [False] * 5
    state = stopping(make_state, patience=1, metric="accuracy")
    assert decisions(state, "loss", [1.0] * 3) == [False] * 3  # this loss defines no accuracy
    assert should_stop(state, Progress(), {}) is False


def test_nan_is_no_improvement_and_does_not_stay_the_best(make_state: MakeState) -> None:
    nan = float("nan")
    state = stopping(make_state, patience=2)
    assert decisions(state, "loss", [1.0, nan, nan]) == [False, False, True]
    assert decisions(state, "loss", [nan, 3.0, 2.0, 1.0]) == [False] * 4


def test_all_ranks_stop_at_the_same_step(make_state: MakeState) -> None:
    # Climbing makes the loss rise, on the samples of one rank more than on those of the other.
    ranks = train_on(
        make_state,
        [3.0, 1.0],
        evaluation=_small(),
        climb=True,
        max_steps=20,
        eval_every=2,
        early_stopping={"patience": 2},
    )
    assert [outcome.stopped_early for _, outcome in ranks] == [True, True]
    assert [outcome.progress.step for _, outcome in ranks] == [6, 6]
    assert [outcome.progress.bad_evaluations for _, outcome in ranks] == [2, 2]
    assert ranks[0][1].progress.best == ranks[1][1].progress.best
    assert_same(parameters(ranks[0][0]), parameters(ranks[1][0]))
    assert ranks[0][1].checkpoint is not None  # of the step it stopped at
    assert ranks[0][1].checkpoint.endswith("6")


# ---------------------------------------------------------------- samples ahead of their step


class Fragile(OneByOne):
    """May be loaded by a thread; sample 7 cannot be read."""

    prefetchable = True

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("sample 7 cannot be read")
        return super().__getitem__(index)


def loaders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_loading_ahead_changes_no_bit(make_state: MakeState, accumulate: int) -> None:
    """Dropout draws its numbers from the generator that a random data set would draw from, too."""
    found = []
    for kind, workers in ((TensorDataset, 0), (OneByOne, 0), (OneByOne, 1)):
        batch = batch_of(30)
        data: Any = TensorDataset(*batch) if kind is TensorDataset else OneByOne(TensorDataset(*batch))
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 4))
        trainer = {"num_workers": workers, "accumulate": accumulate, "max_steps": 9, "log_every": 1}
        state = make_state(SoloCommunicator(), train=data, evaluation=data, model=model, **trainer)
        state.config = state.config.model_copy(
            update={"trainer": state.config.trainer.model_copy(update={"fast_dev_run": 9})}
        )
        outcome = train(state, Progress())
        weights = torch.cat([p.detach().flatten() for p in state.model.parameters()])
        found.append((weights.tolist(), outcome.train_loss, outcome.progress.position, torch.rand(()).item()))
        assert outcome.totals.data_seconds > 0
        assert loaders() == []
    assert found[0] == found[1] == found[2]


def test_no_thread_outlives_a_training_that_ends_early(make_state: MakeState) -> None:
    data = TensorDataset(*batch_of(24))
    stopping = {"eval_every": 1, "early_stopping": {"patience": 1, "min_delta": 1e9}, "max_steps": 20}
    state = make_state(SoloCommunicator(), train=data, evaluation=data, precision="float64", **stopping)
    assert train(state, Progress()).stopped_early
    assert loaders() == []
    state = make_state(SoloCommunicator(), train=Fragile(data), precision="float64", max_steps=20)
    progress = Progress()
    with pytest.raises(OSError, match="sample 7 cannot be read"):
        train(state, progress)
    assert 0 <= progress.step < 3  # in the first epoch, in the step that asks for it
    assert loaders() == []


class Drawing(OneByOne):
    """Adds noise to its samples, and counts how many were read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        inputs, targets = super().__getitem__(index)
        return inputs + torch.rand(3), targets


@pytest.mark.parametrize("on_card", [False, True])
def test_a_card_s_rank_reads_the_next_samples_in_its_wait_and_changes_no_bit(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, on_card: bool
) -> None:
    weights, reads = [], []
    for waits in (False, on_card):
        monkeypatch.setattr(CpuBackend, "computes_on_cpu", not waits)
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 4))
        data: Any = Drawing(TensorDataset(*batch_of(32)))
        trainer = {"global_batch_size": 8, "max_steps": 4, "log_every": 1}
        state = make_state(SoloCommunicator(), train=data, model=model, **trainer)
        state.optimizer.register_step_post_hook(lambda *_, data=data: reads.append(data.reads))
        train(state, Progress())
        weights.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]).tolist())
    assert weights[0] == weights[1]
    assert reads[:4] == [8, 16, 24, 32]
    # The step before the last checkpoint reads nothing ahead: it follows with the present random numbers.
    assert reads[4:] == ([16, 24, 32, 32] if on_card else reads[:4])


def test_a_checkpoint_has_the_random_numbers_before_samples_that_were_read_ahead(
    make_state: MakeState,
) -> None:
    state = make_state(SoloCommunicator())
    ahead = InWaits(iter([torch.rand(2) for _ in range(1)] for _ in range(2)))
    state.random_states = lambda: ahead.states_before
    before = local_states(state)[0]["torch"]
    ahead.take()
    assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(local_states(state)[0]["torch"], before)
    assert ahead.next() is not None
    assert torch.equal(local_states(state)[0]["torch"], torch.get_rng_state())

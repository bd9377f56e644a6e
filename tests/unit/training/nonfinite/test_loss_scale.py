"""The loss scale is torch's arithmetic, one for all ranks; a step that is left out is so by all (case 9)."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from fake_ranks import FakeGroup
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.core.errors import SetupError
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.optimizer.build import build_schedule, schedule_factor
from hetexp.training.evaluate import evaluate
from hetexp.training.loop import Outcome, train
from hetexp.training.loss import Loss
from hetexp.training.nonfinite.loss_scale import (
    LossScale,
    NonFiniteError,
    all_finite,
    check_device,
    unscale_and_check,
    widened,
)
from hetexp.training.saving.resuming import resume
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]
INF, NAN = float("inf"), float("nan")


# ---------------------------------------------------------------- the scale, beside torch's


@settings(deadline=None, max_examples=60)
@given(
    finite=st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=40),
    exponent=st.integers(min_value=0, max_value=126),
    bad=st.sampled_from([INF, -INF, NAN]),
)
def test_the_same_decisions_and_scales_as_torchs(finite: list[bool], exponent: int, bad: float) -> None:
    start = 2.0**exponent
    ours = LossScale(start)
    ours.good_steps = (
        ours.GROWTH_INTERVAL - 3
    )  # doubles after three good steps, and then after as many as ever
    theirs = torch.amp.GradScaler("cpu", init_scale=start)
    theirs.load_state_dict({**theirs.state_dict(), "_growth_tracker": ours.good_steps})
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for good in finite:
        theirs.scale(torch.zeros(()))  # makes its tensors
        gradient = torch.tensor([1.5, -2.0, 1.0 if good else bad])
        parameter.grad = gradient.clone()
        before = parameter.detach().clone()
        theirs.step(optimizer)
        theirs.update()
        mine = gradient.clone()
        went = unscale_and_check([mine], ours, enabled=False)
        assert ours.update(went)
        assert went == (not torch.equal(parameter, before)) == good
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=0, equal_nan=True)
        assert ours.value == theirs.get_scale()
        assert ours.good_steps == theirs.state_dict()["_growth_tracker"]


def test_it_grows_after_two_thousand_good_steps() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale.update(True)
    assert scale.value == 2.0**16
    scale.update(True)
    assert (scale.value, scale.good_steps) == (2.0**17, 0)
    scale.update(True)
    scale.update(False)
    assert (scale.value, scale.good_steps) == (2.0**16, 0)


def test_a_scale_that_is_not_to_blame_stays() -> None:
    scale = LossScale()
    mended = [scale.update(False) for _ in range(31)]
    assert mended == [True] * 30 + [False]
    assert scale.value == LossScale.SMALLEST == 2.0**-14


def test_it_survives_plain_types() -> None:
    scale = LossScale(2.0**11, 17)
    assert LossScale.from_dict(json.loads(json.dumps(scale.to_dict()))) == scale


# ---------------------------------------------------------------- what is finite


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_number_is_found(bad: float, place: int) -> None:
    gradients = [torch.zeros(40, 30), torch.zeros(7)]
    gradients[place].view(-1)[5] = bad
    assert not all_finite(gradients)
    assert unscale_and_check(gradients, None, enabled=True) is False
    assert unscale_and_check(gradients, None, enabled=False) is True


def test_what_is_finite_is_not_called_otherwise() -> None:
    assert all_finite([])
    # Finite numbers whose squares are not: a norm would say so on some devices.
    assert all_finite([torch.full((4,), 3e38), torch.full((4,), -3e38)])
    assert all_finite([torch.zeros(3, 2, dtype=torch.float64)])
    sparse = nn.Embedding(5, 2, sparse=True)
    sparse(torch.tensor([1, 1, 3])).sum().backward()
    assert sparse.weight.grad is not None
    assert all_finite([sparse.weight.grad])
    assert not all_finite([sparse.weight.grad * INF])


def test_a_sum_never_has_half_the_digits() -> None:
    half = torch.ones(3, dtype=torch.float16)
    output = widened(
        {"a": half, "b": [half.bfloat16(), torch.ones(2, dtype=torch.int8)], "c": (half.double(), "x")}
    )
    assert output["a"].dtype is output["b"][0].dtype is torch.float32
    assert output["b"][1].dtype is torch.int8
    assert output["c"][0].dtype is torch.float64
    assert output["c"][1] == "x"
    full = torch.ones(2)
    assert widened(full) is full


def test_objects_of_half_precision_are_widened_unless_they_have_a_loss() -> None:
    half = torch.ones(3, dtype=torch.bfloat16)
    named = widened(Answer(half, None))
    assert named.sample.dtype is torch.float32
    assert isinstance(named, Answer)
    own = Answer(half, torch.ones(()))
    assert widened(own) is own  # logits stay as they are


class Answer(NamedTuple):
    sample: torch.Tensor
    loss: torch.Tensor | None


class Summing(Loss):
    """A person's loss that adds up in the type of what it is given."""

    def count(self, targets: Any) -> int:
        return len(targets)

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        return cast(torch.Tensor, output.sum())


def test_a_persons_loss_adds_up_in_float32(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator(), precisions=("bfloat16",))
    state.loss = Summing()
    with state.autocast(), torch.no_grad():
        output = state.module(torch.ones(600, 3))
        total = state.local_loss(output, torch.zeros(600))
    assert output.dtype is torch.bfloat16
    assert total.dtype is torch.float32
    assert float(total) == pytest.approx(float(output.double().sum()), rel=1e-5)
    assert float(output.sum()) != pytest.approx(float(total), rel=5e-4)


# ---------------------------------------------------------------- the device in hand


class Hand(CpuBackend):
    """A device that has what it says."""

    def __init__(self, *has: str) -> None:
        super().__init__(CpuBackend.describe(0))
        self.has = has

    def computes_in(self, precision: str) -> bool | None:
        return precision in self.has


def test_a_device_that_is_not_what_the_plan_says() -> None:
    check_device(Hand("bfloat16"), "bfloat16")
    check_device(CpuBackend(CpuBackend.describe(0)), "float16")  # cannot be asked
    check_device(Hand(), "float32")  # every device can
    for precision in ("bfloat16", "float64"):
        told = rf"^cpu:0 .* compute in {precision}, .* cannot .*trainer.precision=float32"
        with pytest.raises(SetupError, match=told):
            check_device(Hand("float16"), precision)


# ---------------------------------------------------------------- training


class Bursting(nn.Module):
    """A linear layer; at chosen passes of one rank its gradient (or its output) is no number.

    Args:
        passes: numbers of its training passes, from 0.
        loss_too: whether the loss is no number either.
    """

    def __init__(self, passes: Sequence[int] = (), bad: float = INF, loss_too: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        with torch.no_grad():
            for number, parameter in enumerate(self.layer.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).reshape(parameter.shape))
        self.passes, self.bad, self.loss_too, self.seen = passes, bad, loss_too, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.layer(inputs)
        if self.training and torch.is_grad_enabled():  # a look for the samples is no training pass
            if self.seen in self.passes:
                if self.loss_too:
                    output = output * self.bad
                else:
                    output.register_hook(lambda gradient: gradient + self.bad)
            self.seen += 1
        return cast(torch.Tensor, output)


def batches(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, 3, generator=generator), torch.randint(4, (count,), generator=generator)
    )


def train_on(
    make_state: MakeState,
    weights: Sequence[float],
    passes: Sequence[int] = (),
    bad_rank: int = 1,
    bad: float = INF,
    loss_too: bool = False,
    scale: float | None = None,
    adam: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> list[tuple[TrainState, Outcome]]:
    """Train on as many ranks as there are weights.

    Args:
        passes: at which the gradient of `bad_rank` is `bad`.
        scale: the loss scale to begin with; `None`: none where no rank computes in float16.
    """

    def rank(comm: Communicator) -> tuple[TrainState, Outcome]:
        model = Bursting(passes if comm.rank == bad_rank else (), bad, loss_too)
        state = make_state(comm, weights, model=model, train=batches(), log_every=1, **options)
        if scale is not None:
            state.loss_scale = LossScale(scale)
        if adam:
            state.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            state.schedule = build_schedule(state.optimizer, "constant", 0, state.total_steps)
        return state, train(state, copy.copy(progress) if progress else Progress())

    return FakeGroup(len(weights)).run(rank)


def parameters(state: TrainState) -> list[torch.Tensor]:
    return [p.detach() for p in state.model.parameters()]


def assert_bit_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def lines(state: TrainState) -> list[dict[str, Any]]:
    """Return what was logged of the steps."""
    return [line for _, line in cast(Any, state.loggers[0]).lines if "train/loss" in line]


@pytest.mark.parametrize("scale", [2.0**16, 1.0, 2.0**-9])
@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ([1.0], {}),
        ([6.0, 2.0], {"clip_norm": 0.3}),
        ([5.0, 2.0, 1.0], {"accumulate": 2, "clip_norm": 0.3}),
        ([1.0, 0.0], {"accumulate": 2}),
    ],
)
def test_a_scaled_run_in_float32_is_the_unscaled_one_to_the_bit(
    make_state: MakeState, weights: list[float], options: dict[str, Any], scale: float
) -> None:
    plain = train_on(make_state, weights, max_steps=6, **options)
    scaled = train_on(make_state, weights, scale=scale, max_steps=6, **options)
    for (one, first), (other, second) in zip(plain, scaled, strict=True):
        assert_bit_equal(parameters(one), parameters(other))
        assert first.train_loss == second.train_loss
        assert other.loss_scale == LossScale(scale, 6)
    told = lines(scaled[0][0])
    assert [line["train/loss_scale"] for line in told] == [scale] * 6
    assert [line["train/skipped_steps"] for line in told] == [0] * 6
    assert [line.get("train/grad_norm") for line in told] == [
        line.get("train/grad_norm") for line in lines(plain[0][0])
    ]
    assert not any("skipped" in key or "scale" in key for line in lines(plain[0][0]) for key in line)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ([6.0, 2.0], {}),
        ([2.0, 5.0, 1.0], {"clip_norm": 0.3}),
        ([6.0, 2.0], {"accumulate": 2, "clip_norm": 0.3}),  # the first of two microbatches bursts
        ([4.0, 2.0, 2.0], {"microbatch_size": 1}),
    ],
)
def test_all_ranks_leave_out_the_step_in_which_one_bursts(
    make_state: MakeState, weights: list[float], options: dict[str, Any], bad: float
) -> None:
    pieces = options.get("accumulate") or (2 if "microbatch_size" in options else 1)
    ranks = train_on(
        make_state, weights, [2 * pieces], bad=bad, scale=2.0**16, adam=True, max_steps=5, **options
    )
    kept = train_on(make_state, weights, scale=2.0**16, adam=True, max_steps=5, **options)
    for parts, outcome in ranks:
        assert_bit_equal(parameters(parts), parameters(ranks[0][0]))
        assert all(parameter.isfinite().all() for parameter in parameters(parts))
        assert parts.loss_scale == LossScale(2.0**15, 2)
        assert (outcome.progress.step, outcome.progress.skipped_steps) == (5, 1)
        # The samples of the step are used up, the weights and moments know nothing of it.
        assert outcome.progress.position == kept[0][1].progress.position
        assert {float(state["step"]) for state in parts.optimizer.state.values()} == {4.0}
    told = lines(ranks[0][0])
    assert [line["train/skipped_steps"] for line in told] == [0, 0, 1, 1, 1]
    assert [line["train/loss_scale"] for line in told] == [2.0**16] * 2 + [2.0**15] * 3
    if "clip_norm" in options:
        assert [math.isfinite(line["train/grad_norm"]) for line in told] == [True, True, False, True, True]


def test_a_step_left_out_changes_nothing_but_the_number(make_state: MakeState) -> None:
    """Two steps, of which the second is left out, end with the weights of one."""
    one = train_on(make_state, [6.0, 2.0], scale=2.0**16, max_steps=1)
    two = train_on(make_state, [6.0, 2.0], [1], scale=2.0**16, max_steps=2)
    for (a, _), (b, outcome) in zip(one, two, strict=True):
        assert_bit_equal(parameters(a), parameters(b))
        assert outcome.progress.samples == 16


@pytest.mark.parametrize("weights", [[1.0], [6.0, 2.0], [5.0, 2.0, 1.0]])
@pytest.mark.parametrize("passes", [(0, 1), (2,), (5,)])
def test_the_learning_rate_follows_the_step_not_the_updates(
    make_state: MakeState, weights: list[float], passes: tuple[int, ...], recwarn: pytest.WarningsRecorder
) -> None:
    """Case 39: one list of rates whatever is left out, down to the planned end."""
    ranks = train_on(
        make_state, weights, passes, bad_rank=0, scale=2.0**16, max_steps=6, schedule="cosine", warmup_steps=2
    )
    rates = [line["train/learning_rate"] for line in lines(ranks[0][0])]
    assert rates == pytest.approx([0.1 * schedule_factor(step, "cosine", 2, 6) for step in range(6)])
    assert ranks[0][0].schedule.last_epoch == 6
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_a_burst_that_a_smaller_scale_mends(make_state: MakeState) -> None:
    """float16 overflows at 65504: torch's arithmetic, not ours, makes the infinity."""
    data = TensorDataset(torch.full((24, 3), 100.0), torch.zeros(24, dtype=torch.int64))

    def rank(comm: Communicator) -> tuple[TrainState, Outcome]:
        state = make_state(
            comm,
            [6.0, 2.0],
            train=data,
            precisions=("float32", "float16"),
            max_steps=24,
            log_every=1,
            learning_rate=1e-6,
        )
        assert state.loss_scale == LossScale()
        state.loss_scale.value = 2.0**24
        return state, train(state, Progress())

    ranks = FakeGroup(2).run(rank)
    skipped = {outcome.progress.skipped_steps for _, outcome in ranks}
    assert len(skipped) == 1
    assert 5 < skipped.pop() < 20
    assert ranks[0][0].loss_scale == ranks[1][0].loss_scale
    assert_bit_equal(parameters(ranks[0][0]), parameters(ranks[1][0]))
    assert ranks[0][1].train_loss is not None and math.isfinite(ranks[0][1].train_loss)


# ---------------------------------------------------------------- mixtures


@pytest.mark.parametrize(
    "precisions", [("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "float16")]
)
def test_ranks_of_different_precision_hold_the_same_weights(
    make_state: MakeState, precisions: tuple[str, str]
) -> None:
    mixed = train_on(make_state, [5.0, 3.0], precisions=precisions, max_steps=6)
    full = train_on(make_state, [5.0, 3.0], max_steps=6)
    assert_bit_equal(parameters(mixed[0][0]), parameters(mixed[1][0]))
    assert mixed[0][1].train_loss == pytest.approx(full[0][1].train_loss, rel=0.02)
    assert mixed[0][1].train_loss != full[0][1].train_loss  # somebody did compute in half precision
    for parts, _ in mixed:
        assert (parts.loss_scale is not None) == ("float16" in precisions)
        assert all(p.dtype is torch.float32 for p in parts.model.parameters())
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in parts.model.parameters())


def test_a_small_gradient_survives_float16_by_the_scale(make_state: MakeState) -> None:
    """Without a scale it is below the smallest number that float16 has."""
    data = TensorDataset(torch.ones(4096, 3), torch.zeros(4096, dtype=torch.int64))
    options = {"train": data, "max_steps": 1, "global_batch_size": 4096, "learning_rate": 1.0}

    def moved(precision: str, scale: LossScale | None) -> torch.Tensor:
        model = nn.Linear(3, 4)
        with torch.no_grad():
            model.weight.copy_(torch.zeros(4, 3))
            model.bias.copy_(torch.tensor([12.0, 0.0, 0.0, 0.0]))  # sure of the right class
        state = make_state(SoloCommunicator(), model=model, precisions=(precision,), **options)
        state.loss_scale = scale
        before = model.weight.detach().clone()
        train(state, Progress())
        return model.weight.detach() - before

    exact = moved("float32", None)
    assert not torch.count_nonzero(moved("float16", None))
    torch.testing.assert_close(moved("float16", LossScale()), exact, rtol=5e-3, atol=0)


def test_evaluation_computes_in_the_ranks_precision(make_state: MakeState) -> None:
    def losses(*precisions: str) -> list[dict[str, float]]:
        def rank(comm: Communicator) -> dict[str, float]:
            weights = [1.0] * len(precisions)
            return evaluate(make_state(comm, weights, precisions=precisions, evaluation=batches(21)))

        return FakeGroup(len(precisions)).run(rank)

    (full,), (half,) = losses("float32"), losses("bfloat16")
    assert full["loss"] != half["loss"] == pytest.approx(full["loss"], rel=1e-2)
    mixed = losses("bfloat16", "float32")
    assert mixed[0] == mixed[1]
    assert mixed[0]["loss"] not in (full["loss"], half["loss"])


# ---------------------------------------------------------------- no scale to blame


def test_a_diverged_run_stops_before_its_weights_are_harmed(make_state: MakeState) -> None:
    seen: list[TrainState] = []

    def keep(comm: Communicator, weights: Sequence[float] = (1.0,), **options: Any) -> TrainState:
        seen.append(make_state(comm, weights, **options))
        return seen[-1]

    with pytest.raises(NonFiniteError) as caught:
        train_on(keep, [6.0, 2.0], [2], bad=NAN, loss_too=True, max_steps=5)
    told = str(caught.value)
    assert told.startswith(
        "The gradient of step 3 is not finite (first in layer.weight), and the loss is nan on rank 1, cpu:1 "
    )
    assert "rank 0" not in told
    assert "`optimizer.lr`" in told and "trainer.non_finite=skip" in told
    (first,) = [parts for parts in seen if parts.rank == 0]
    assert [math.isnan(line["train/loss"]) for line in lines(first)] == [False, False, True]
    reference = train_on(make_state, [6.0, 2.0], max_steps=2)
    for parts in seen:
        assert_bit_equal(parameters(parts), parameters(reference[0][0]))


def test_a_gradient_may_burst_though_the_loss_does_not(make_state: MakeState) -> None:
    with pytest.raises(NonFiniteError, match="step 1 .* every loss is finite"):
        train_on(make_state, [6.0, 2.0], [0], max_steps=5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_steps_may_be_left_out_without_a_scale(
    make_state: MakeState, caplog: pytest.LogCaptureFixture, precision: str
) -> None:
    with caplog.at_level(logging.WARNING):
        ranks = train_on(
            make_state,
            [6.0, 2.0],
            [1, 3],
            bad=NAN,
            loss_too=True,
            precision=precision,
            max_steps=5,
            non_finite="skip",
        )
    for parts, outcome in ranks:
        assert_bit_equal(parameters(parts), parameters(ranks[0][0]))
        assert all(parameter.isfinite().all() for parameter in parameters(parts))
        assert (outcome.progress.step, outcome.progress.skipped_steps) == (5, 2)
    assert [line["train/skipped_steps"] for line in lines(ranks[0][0])] == [0, 1, 1, 2, 2]
    (warning,) = caplog.messages  # once
    assert "step 2" in warning and "nan on rank 1, cpu:1" in warning


def test_who_does_not_want_to_know_goes_on(make_state: MakeState) -> None:
    ranks = train_on(make_state, [6.0, 2.0], [1], bad=NAN, max_steps=3, non_finite="continue")
    assert not all_finite(parameters(ranks[0][0]))
    assert ranks[0][1].progress.skipped_steps == 0
    assert math.isnan(lines(ranks[0][0])[-1]["train/loss"])


def test_a_float16_run_stops_when_no_scale_is_small_enough(make_state: MakeState) -> None:
    options: dict[str, Any] = {"passes": range(50), "bad": NAN, "loss_too": True, "max_steps": 50}
    with pytest.raises(NonFiniteError, match=r"step 31 .*nan on rank 1"):
        train_on(make_state, [6.0, 2.0], scale=2.0**16, **options)
    for choice in ("skip", "continue"):  # float16 needs its skips whatever one chooses
        ranks = train_on(make_state, [6.0, 2.0], scale=2.0**16, non_finite=choice, **options)
        assert ranks[0][1].progress.skipped_steps == 50
        assert all_finite(parameters(ranks[1][0]))


# ---------------------------------------------------------------- checkpoints


def test_a_resumed_run_goes_on_with_its_scale(make_state: MakeState, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precisions": ("float32", "float16"), "total_steps": 6, "schedule": "linear"}
    whole = train_on(make_state, [6.0, 2.0], [2], max_steps=6, **options)
    for folder in (tmp_path / "checkpoints").iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    half = train_on(
        make_state, [6.0, 2.0], [2], checkpoint_every=4, max_steps=4, **{**options, "total_steps": 4}
    )
    assert half[0][0].loss_scale == LossScale(2.0**15, 1)

    def rank(comm: Communicator) -> tuple[TrainState, Outcome]:
        state = make_state(comm, [6.0, 2.0], model=Bursting(), train=batches(), max_steps=6, **options)
        state.config = state.config.model_copy(update={"resume": str(tmp_path / "checkpoints")})
        progress = resume(state)
        assert state.loss_scale == LossScale(2.0**15, 1)
        assert (progress.step, progress.skipped_steps) == (4, 1)
        return state, train(state, progress)

    for (state, outcome), (other, _) in zip(FakeGroup(2).run(rank), whole, strict=True):
        assert state.loss_scale == other.loss_scale == LossScale(2.0**15, 3)
        assert outcome.progress.skipped_steps == 1


def test_a_checkpoint_of_other_devices_brings_no_scale(make_state: MakeState, tmp_path: Path) -> None:
    train_on(make_state, [1.0], max_steps=2)

    def resumed(**options: Any) -> TrainState:
        state = make_state(SoloCommunicator(), model=Bursting(), max_steps=4, **options)
        state.config = state.config.model_copy(update={"resume": str(tmp_path / "checkpoints")})
        resume(state)
        return state

    assert resumed(precisions=("float16",)).loss_scale == LossScale()
    assert resumed().loss_scale is None


def test_the_fixture_gives_what_was_asked_for(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator(), precisions=("float16",))
    assert (state.precision, state.dtype) == ("float16", torch.float32)
    assert SimpleNamespace(**state.plan.config["trainer"]).max_steps == 3


def test_the_scale_stays_a_number_of_float32() -> None:
    scale = LossScale(LossScale.LARGEST, LossScale.GROWTH_INTERVAL - 1)
    assert scale.update(True)
    assert scale.value == torch.tensor(scale.value).item() == LossScale.LARGEST


def test_sparse_gradients_are_unscaled_beside_dense_ones() -> None:
    dense, sparse = (
        torch.tensor([4.0, -8.0]),
        torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[4.0, 12.0]]), (3, 2)),
    )
    LossScale(4.0).unscale([dense, sparse])
    assert dense.tolist() == [1.0, -2.0]
    assert sparse.to_dense().tolist() == [[0.0, 0.0], [1.0, 3.0], [0.0, 0.0]]

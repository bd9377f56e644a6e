"""Which samples on which device keep a step's gradient from being finite, and what the step must not harm."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import FakeGroup
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.checkpoint.manifest import find_checkpoint
from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.training.loop import train
from hetexp.training.loss import CrossEntropy, Loss
from hetexp.training.nonfinite.loss_scale import NonFiniteError
from hetexp.training.nonfinite.samples import NonFiniteSamples
from hetexp.training.nonfinite.search import explain
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]
NAN = float("nan")


def data(*bad: int, value: float = NAN) -> TensorDataset:
    """Return 24 samples, some of which have this value in their inputs."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 3, generator=generator)
    inputs[list(bad), 1] = value
    return TensorDataset(inputs, torch.randint(4, (24,), generator=generator))


class Steep(torch.autograd.Function):
    """Passes values on; the gradient of a sample that begins with 7 is infinite."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs[:, 1] == 7)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        (steep,) = ctx.saved_tensors
        return None, gradients[0] + torch.where(steep, math.inf, 0.0).unsqueeze(1)


class Net(nn.Module):
    """A batch norm, dropout and a linear layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout, self.layer = nn.BatchNorm1d(3), nn.Dropout(dropout), nn.Linear(3, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.dropout(self.norm(torch.where(inputs == 7, 0.5, inputs))))
        return Steep.apply(inputs, hidden)  # type: ignore[no-any-return, no-untyped-call]


def train_on(
    make_state: MakeState, weights: list[float], bad: TensorDataset, loss: Loss | None = None, **options: Any
) -> list[TrainState]:
    def rank(comm: Communicator) -> TrainState:
        torch.manual_seed(0)
        state = make_state(comm, weights, train=bad, model=Net(), **options)
        state.loss = loss or state.loss
        train(state, Progress())
        return state

    return FakeGroup(len(weights)).run(rank)


def order(make_state: MakeState) -> list[int]:
    """Return the samples of the first steps in their order."""
    sampler = make_state(SoloCommunicator()).sampler
    return [int(index) for index in sampler._order(0)]


def test_what_a_rank_found_travels_as_numbers() -> None:
    for found in (
        NonFiniteSamples(),
        NonFiniteSamples(1, [3, 2**40], 2, 7),
        NonFiniteSamples(2, list(range(8)), 30),
    ):
        row = torch.tensor(found.to_row(), dtype=torch.float64).tolist()
        assert NonFiniteSamples.from_row(row) == found
    assert NonFiniteSamples(1, [3], 1).words() == "training sample 3"
    assert (
        NonFiniteSamples(1, list(range(8)), 9).words() == "training samples 0, 1, 2, 3, 4, 5, 6, 7 and more"
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_samples_of_a_loss_are_named(make_state: MakeState, accumulate: int) -> None:
    places = order(make_state)
    bad = sorted([places[8 + 6], places[8 + 7]])  # of step 2, both of rank 1
    with pytest.raises(NonFiniteError) as caught:
        train_on(make_state, [4.0, 4.0], data(*bad), max_steps=4, accumulate=accumulate)
    told = str(caught.value)
    assert (
        "The gradient of step 2 is not finite (first in norm.weight), and the loss is nan on rank 1" in told
    )
    assert f"because of training samples {bad[0]}, {bad[1]}." in told
    assert "rank 0" not in told


def test_the_samples_of_a_gradient_are_named(make_state: MakeState) -> None:
    bad = order(make_state)[2]  # of step 1, on rank 0
    with pytest.raises(NonFiniteError) as caught:
        train_on(make_state, [5.0, 3.0], data(bad, value=7), max_steps=4)
    told = str(caught.value)
    assert "every loss is finite, but rank 0's own gradient, on cpu:0" in told
    assert f"because of training sample {bad}." in told
    assert "(first in norm.weight), because" in told


def test_samples_are_named_where_memory_cut_the_microbatches(make_state: MakeState) -> None:
    bad = order(make_state)[8 + 5]
    state = make_state(SoloCommunicator(), train=data(bad), model=Net(), max_steps=3)
    state.microbatch_limits = [4]
    with pytest.raises(NonFiniteError, match=rf"step 2 .* because of training sample {bad}\."):
        train(state, Progress())


def test_many_samples_are_not_all_named(make_state: MakeState) -> None:
    with pytest.raises(NonFiniteError, match=r"training samples (\d+, ){7}\d+ and more\."):
        train_on(make_state, [1.0], data(*range(24)), global_batch_size=24, max_steps=1)


class InfiniteLoss(CrossEntropy):
    """A loss that is infinite where its gradient is not."""

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().total(output, targets) + (math.inf if len(targets) == 3 else 0.0)


def test_an_infinite_loss_with_a_finite_gradient_is_found(make_state: MakeState) -> None:
    """Only rank 1 has it, in a pass over three samples; one alone gives none."""
    with pytest.raises(
        NonFiniteError, match=r"the loss is inf on rank 1.*in a pass over training samples"
    ) as told:
        train_on(make_state, [5.0, 3.0], data(), loss=InfiniteLoss(), max_steps=4)
    assert "of which none is so alone" in str(told.value)


def test_buffers_and_random_numbers_are_as_if_nothing_had_been(
    make_state: MakeState, caplog: pytest.LogCaptureFixture
) -> None:
    """The running statistics that follow are finite, and come of the other steps alone."""
    places = order(make_state)
    with caplog.at_level(logging.WARNING):
        (state,) = train_on(make_state, [1.0], data(places[10]), max_steps=3, non_finite="skip")
    assert f"because of training sample {places[10]}" in caplog.text
    norm = state.model.norm
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked == 2
    assert norm.running_mean is not None and norm.running_mean.isfinite().all()
    expected = torch.zeros(3)
    for step in (0, 2):
        inputs = data().tensors[0][places[8 * step : 8 * step + 8]]
        expected = 0.9 * expected + 0.1 * inputs.mean(dim=0)
    torch.testing.assert_close(norm.running_mean, expected)


def test_the_search_draws_no_random_numbers(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator(), train=data(0), model=Net(dropout=0.5))
    from hetexp.data.loader import local_batches

    (batch,) = local_batches(data(0), state.sampler, Progress().position, 1, state.balancer.split, 0)
    before = torch.get_rng_state()
    told = explain(state, 1, batch, torch.tensor(NAN), [], 1.0)
    assert torch.equal(before, torch.get_rng_state())
    assert ("training sample 0." in told) == (0 in batch.indices[0])
    assert state.model.norm.training  # type: ignore[union-attr]


def test_a_model_that_refuses_one_sample_ends_with_its_own_error(make_state: MakeState) -> None:
    class Refuses(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if len(inputs) < 8:
                raise ValueError("a batch of 8, please")
            return super().forward(inputs)

    state = make_state(SoloCommunicator(), train=data(*range(24)), model=Refuses())
    with pytest.raises(NonFiniteError, match=r"the loss is nan on rank 0, cpu:0 \([^,]*\)\."):
        train(state, Progress())


def test_the_state_before_is_saved_and_goes_on(make_state: MakeState, tmp_path: Path) -> None:
    places = order(make_state)
    options: dict[str, Any] = {"max_steps": 3, "schedule": "linear"}
    with pytest.raises(NonFiniteError, match=r"is saved \(.*step_00000002\).*trainer.non_finite=skip"):
        train_on(make_state, [6.0, 2.0], data(places[20]), **options)
    state = make_state(SoloCommunicator(), train=data(places[20]), model=Net(), non_finite="skip", **options)
    from hetexp.training.saving.resuming import resume

    object.__setattr__(state.config, "resume", str(find_checkpoint(tmp_path)))
    progress = resume(state)
    assert (progress.step, progress.samples, progress.skipped_steps) == (2, 16, 0)
    assert progress.position.offset == 16
    assert state.schedule.last_epoch == 2
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)
    outcome = train(state, progress)
    assert (outcome.progress.step, outcome.progress.skipped_steps) == (3, 1)


def test_nothing_is_saved_where_no_step_was_done(make_state: MakeState, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="start again"):
        train_on(make_state, [6.0, 2.0], data(order(make_state)[0]), max_steps=3)
    assert not (tmp_path / "checkpoints").exists()


def test_an_evaluation_that_is_no_number_is_told(
    make_state: MakeState, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(SoloCommunicator(), evaluation=data(2), max_steps=1)
    with caplog.at_level(logging.WARNING):
        outcome = train(state, Progress())
    assert "The loss of the evaluation at step 1 is nan." in caplog.text
    assert outcome.evaluation is not None and math.isnan(outcome.evaluation["loss"])

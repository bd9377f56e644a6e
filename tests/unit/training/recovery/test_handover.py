"""All of a training's state comes from one rank to the others, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import FakeGroup
from torch import nn

from hetexp.comm.communicator import Communicator
from hetexp.data.sampler import Position
from hetexp.training.loop import Training, evaluation_over
from hetexp.training.recovery import handover
from hetexp.training.recovery.handover import receive_state, send, send_state, set_state, state_of
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]
SIZES = [(), (3,), (40, 7), (0,), (1000,)]


class Tied(nn.Module):
    """Two names of one weight, a buffer that is not saved, one that counts, and a weight of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
        self.second.weight = self.first.weight
        self.register_buffer("hidden", torch.zeros(5), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(inputs) + self.first(inputs)
        return out


@pytest.mark.parametrize("piece", [16, 1000, 2**24])
def test_messages_of_any_size_bring_all_bits(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(handover, "CHUNK_BYTES", piece)

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(communicator.rank)
        tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]
        tensors += [torch.tensor([True, False]), torch.tensor([math.nan, -0.0], dtype=torch.bfloat16)]
        if communicator.rank != 1:
            tensors[-2].fill_(False)
            tensors[-1].fill_(7)
        send(tensors, communicator, 1)
        return tensors

    everyone = FakeGroup(3).run(rank)
    for other in (everyone[0], everyone[2]):
        for mine, theirs in zip(everyone[1], other, strict=True):
            assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def trained(make_state: MakeState, communicator: Communicator, steps: int) -> TrainState:
    """Return parts whose model and moments are those after so many steps, different for each number."""
    model = Tied()
    state = make_state(communicator, (1.0,) * communicator.world_size, model=model)
    state.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state.schedule.optimizer = state.optimizer
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 + step)
        state.optimizer.step()
        model.get_buffer("count").add_(1)
        model.get_buffer("hidden").add_(step)
    return state


def test_model_buffers_and_moments_are_those_of_the_donor(make_state: MakeState) -> None:
    alone = FakeGroup(1)
    donor, other = alone.run(lambda c: (trained(make_state, c, 3), trained(make_state, c, 0)))[0]
    tensors, packed = state_of(donor)
    assert "buffer/hidden" in tensors
    assert sum(name.startswith("model/") for name in tensors) == 3  # the tied weight once
    set_state(other, tensors, packed)
    again, repacked = state_of(other)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(again[name], tensor), name
        assert again[name].dtype == tensor.dtype
    assert repacked == packed
    model: Any = other.model
    assert model.second.weight is model.first.weight


PLATEAU = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "factor": 0.5}


@pytest.mark.parametrize("step_ended", [False, True])
def test_all_have_the_donors_rates_after_an_evaluation(make_state: MakeState, step_ended: bool) -> None:
    """Rank 0 has done the last step's evaluation, rank 1 has not, rank 2 comes new."""
    store = dist.HashStore()

    def rank(communicator: Communicator) -> tuple[float, Any]:
        options: dict[str, Any] = {"schedule": PLATEAU, "eval_every": 1, "learning_rate": 1.0}
        state = make_state(communicator, (1.0,) * 3, **options)
        training = Training(state, Progress(), ready=communicator.rank != 2)
        progress = training.progress
        for number, loss in enumerate((1.0, 2.0, 3.0)[: {0: 3, 1: 2, 2: 0}[communicator.rank]]):
            progress.step = number + 1
            training.good = replace(progress)
            evaluation_over(state, progress, {"loss": loss})
        if communicator.rank == 0:
            send_state(training, store, step_ended=step_ended, tensors=True, handled=0)
        receive_state(training, store, 0, behind=communicator.rank == 2, tensors=True)
        return state.optimizer.param_groups[0]["lr"], progress.schedule

    results = FakeGroup(3).run(rank)
    assert [rate for rate, _ in results] == [0.25 if step_ended else 0.5] * 3
    assert results[0][1] == results[1][1] == results[2][1]


def test_those_behind_and_newcomers_stand_where_the_donor_stands(make_state: MakeState) -> None:
    """Rank 2 has the newest step; rank 0 is a step behind, rank 1 comes new."""
    store = dist.HashStore()

    def rank(communicator: Communicator) -> tuple[Training, int]:
        steps = {0: 2, 1: 0, 2: 3}[communicator.rank]
        state = trained(make_state, communicator, steps)
        progress = Progress(step=steps, position=Position(0, 8 * steps), samples=8 * steps)
        training = Training(state, progress, ready=communicator.rank != 1)
        training.loss_at, training.logged_at = (steps, 0.5 * steps), steps - 1
        training.outcome.evaluation = {"loss": float(steps)}
        if communicator.rank == 2:
            send_state(training, store, step_ended=False, tensors=True, handled=4)
        return training, receive_state(training, store, 2, behind=steps < 3, tensors=True)

    (zero, first), (one, second), (two, third) = FakeGroup(3).run(rank)
    assert (first, second, third) == (4, 4, 4)
    wanted = state_of(two.state)[0]
    for training in (zero, one):
        assert training.progress == two.progress == training.good
        assert training.progress.step == 3
        assert training.loss_at == (3, 1.5)
        assert training.logged_at == 2
        assert training.outcome.evaluation == {"loss": 3.0}
        assert training.state.schedule.last_epoch == 3
        for name, tensor in state_of(training.state)[0].items():
            assert torch.equal(tensor, wanted[name]), name


def test_no_tensor_travels_where_all_are_at_one_step(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "send", lambda *_: pytest.fail("nobody lacks anything"))
    store = dist.HashStore()

    def rank(communicator: Communicator) -> Training:
        training = Training(trained(make_state, communicator, 1), Progress(step=1))
        training.progress.best = 0.25  # of an evaluation that not all have ended
        if communicator.rank == 0:
            send_state(training, store, step_ended=False, tensors=False, handled=0)
        receive_state(training, store, 0, behind=False, tensors=False)
        return training

    one, other = FakeGroup(2).run(rank)
    assert one.progress == other.progress
    assert one.progress.best is None  # it is to be decided again

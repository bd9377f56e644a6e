"""An update that is queued before anyone knows whether its gradient is finite is the same update, or none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_ranks import FakeGroup
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.optimizer.build import build_schedule
from hetexp.training import step as module
from hetexp.training.loop import train
from hetexp.training.nonfinite.grad_check import GradCheck, may_be_skipped, skip_if_nonfinite
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]


def data(bad: int | None = None) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 3, generator=generator)
    if bad is not None:
        inputs[bad] = torch.inf
    return TensorDataset(inputs, torch.randint(4, (24,), generator=generator))


def fused(state: TrainState, **options: Any) -> TrainState:
    """Give the parts an optimizer whose update the device can leave out."""
    state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.05, fused=True, **options)
    state.schedule = build_schedule(state.optimizer, "cosine", 1, state.total_steps)
    return state


def snapshot(parts: TrainState) -> list[torch.Tensor]:
    state = [value for one in parts.optimizer.state.values() for value in one.values()]
    return [value.detach().clone() for value in (*parts.model.parameters(), *state)]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_skipped_update_changes_nothing_and_another_is_as_ever(kind: Any, amsgrad: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = kind(model.parameters(), lr=0.1, fused=True, amsgrad=amsgrad)
    plain_model = copy.deepcopy(model)
    plain = kind(plain_model.parameters(), lr=0.1, fused=True, amsgrad=amsgrad)
    for bad in (True, False, True, False):
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            theirs.grad = torch.randn_like(ours)
            ours.grad = torch.full_like(ours, torch.nan) if bad else theirs.grad.clone()
        with skip_if_nonfinite(optimizer, torch.tensor(bad)):
            optimizer.step()
        if not bad:
            plain.step()
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
    for ours, theirs in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("bad", [None, 5])
def test_a_run_is_the_same_to_the_bit(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, bad: int | None, clip_norm: float | None
) -> None:
    options: dict[str, Any] = {"train": data(bad), "non_finite": "skip", "clip_norm": clip_norm}
    options |= {"max_steps": 6, "max_epochs": None, "log_every": 1}

    def run() -> tuple[list[torch.Tensor], list[dict[str, Any]], int]:
        def rank(comm: Communicator) -> tuple[list[torch.Tensor], list[dict[str, Any]], int]:
            state = fused(make_state(comm, [3, 1], **options))
            progress = Progress()
            train(state, progress)
            lines = [dict(line) for _, line in state.loggers[0].lines] if state.rank == 0 else []  # type: ignore[attr-defined]
            kept = ("train/loss", "train/grad_norm", "train/learning_rate", "train/skipped_steps")
            return snapshot(state), [{key: line.get(key) for key in kept} for line in lines], progress.step

        first, second = FakeGroup(2).run(rank)
        assert_equal(first[0], second[0])
        return first

    ahead = run()
    assert ahead[1][-1]["train/skipped_steps"] == (0 if bad is None else 2)  # once in each of two epochs
    monkeypatch.setattr(module, "may_be_skipped", lambda state: False)
    after = run()
    assert_equal(ahead[0], after[0])
    assert repr(ahead[1]) == repr(after[1]) and ahead[2] == after[2]  # by their digits: NaN is not NaN


def test_the_update_is_queued_before_the_verdict_is_read(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    class Slow(CpuBackend):
        def read_later(self, value: torch.Tensor) -> Callable[[], float]:
            happened.append("asked")
            return lambda: happened.append("read") or float(value)  # type: ignore[func-returns-value]

    state = fused(make_state(SoloCommunicator(), train=data()))
    state.backend = Slow(state.backend.spec)
    state.optimizer.register_step_pre_hook(lambda *_: happened.append("queued"))
    train(state, Progress())
    assert happened == ["asked", "queued", "read"] * 3


def test_what_may_be_skipped(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator())
    assert not may_be_skipped(state)  # SGD
    assert may_be_skipped(fused(state))
    state.optimizer = torch.optim.AdamW(state.model.parameters())
    assert not may_be_skipped(state)  # torch's other ways would refuse
    fused(state)
    emulated = replace(state.plan.devices[0], backend="emulated")
    state.plan = replace(state.plan, devices=(emulated,))
    assert state.plan.paced and not may_be_skipped(state)


def test_the_verdict_is_of_the_gradients_without_their_scale(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator(), precisions=("float16",))
    assert state.loss_scale is not None
    gradients = [torch.tensor([3e38]), torch.tensor([0.0])]
    state.loss_scale.unscale(gradients)
    verdict = GradCheck(state, gradients, enabled=True)
    assert verdict.finite() and float(gradients[0]) == pytest.approx(3e38 / 2**16)
    for value in (torch.nan, torch.inf):
        verdict = GradCheck(state, [torch.tensor([1.0, value])], enabled=True)
        assert not verdict.finite() and verdict.bad is not None and bool(verdict.bad)
        unseen = GradCheck(state, [torch.tensor([value])], enabled=False)
        assert unseen.finite() and unseen.bad is None
    assert GradCheck(state, [], enabled=True).finite()

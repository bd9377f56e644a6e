"""A rank's own work is told apart from its waiting (case 12), by a clock that the tests turn themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable

from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.training.measuring.timer import StepTimer


class ClockBackend(CpuBackend):
    """Marks are readings of a clock that only `work` moves; reading one before `synchronize` is an error."""

    def __init__(self) -> None:
        super().__init__(CpuBackend.describe(0))
        self.now = 0.0
        self.finished = 0.0

    def mark(self) -> float:
        return self.now

    def seconds_between(self, start: float, end: float) -> float:
        assert end <= self.finished, "the device may not be there yet"
        return end - start

    def wait(self, mark: float) -> None:
        self.finished = max(self.finished, mark)

    def synchronize(self) -> None:
        self.finished = self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, backend: ClockBackend, seconds: float) -> torch.Tensor:
        ctx.backend, ctx.seconds = backend, seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.backend.work(ctx.seconds)
        return gradients[0], None, None


def loss_that_takes(backend: ClockBackend, parameter: nn.Parameter, seconds: float) -> torch.Tensor:
    loss: torch.Tensor = _Takes.apply(parameter.sum(), backend, seconds)  # type: ignore[no-untyped-call]
    return loss


@pytest.fixture
def backend() -> ClockBackend:
    return ClockBackend()


def waits_at_the_end(backend: ClockBackend, parameter: nn.Parameter, seconds: float) -> None:
    """Wait as DDP does: in a callback that the last gradient queues."""
    parameter.register_post_accumulate_grad_hook(
        lambda _: Variable._execution_engine.queue_callback(lambda: backend.work(seconds))
    )


def test_own_work_ends_before_the_wait(backend: ClockBackend) -> None:
    parameter = nn.Parameter(torch.ones(3))
    waits_at_the_end(backend, parameter, 100.0)
    meter = StepTimer(backend)
    meter.backward(loss_that_takes(backend, parameter, 4.0))
    assert meter.take() == (4.0, 100.0, 0)
    assert torch.equal(parameter.grad, torch.ones(3)) if parameter.grad is not None else False


def test_without_an_exchange_there_is_no_wait(backend: ClockBackend) -> None:
    meter = StepTimer(backend)
    meter.backward(loss_that_takes(backend, nn.Parameter(torch.ones(1)), 2.5))
    assert meter.take() == (2.5, 0.0, 0)


def test_spans_and_backwards_add_up(backend: ClockBackend) -> None:
    parameter = nn.Parameter(torch.ones(1))
    waits_at_the_end(backend, parameter, 10.0)
    meter = StepTimer(backend)
    for seconds in (1.0, 2.0):
        start = backend.mark()
        backend.work(0.5)  # forward
        meter.span(start, backend.mark())
        backend.work(7.0)  # neither own work nor a wait in backward
        meter.backward(loss_that_takes(backend, parameter, seconds))
        meter.samples += 3
    assert meter.take() == (4.0, 20.0, 6)
    assert meter.take() == (0.0, 0.0, 0)  # each take starts again


def test_marks_are_read_only_after_the_device_is_done(backend: ClockBackend) -> None:
    meter = StepTimer(backend)
    meter.span(0.0, 0.0)
    meter.backward(loss_that_takes(backend, nn.Parameter(torch.ones(1)), 1.0))
    assert backend.finished == 0.0  # measuring made nobody wait
    meter.read_marks()
    assert meter.compute_seconds == 1.0
    meter.read_marks()
    assert meter.compute_seconds == 1.0  # no span counts twice


def test_gradients_are_those_of_a_plain_backward(backend: ClockBackend) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    model(inputs).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    StepTimer(backend).backward(model(inputs).sum())
    metered = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(plain) == len(metered) == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, metered, strict=True))


def test_each_steps_own_work_is_told_once(backend: ClockBackend) -> None:
    meter = StepTimer(backend)
    assert meter.since_last() == 0.0
    for seconds in (2.0, 3.0):
        start = backend.mark()
        backend.work(seconds)
        meter.span(start, backend.mark())
        assert meter.since_last() == seconds
    assert meter.since_last() == 0.0
    assert meter.take()[0] == 5.0  # the window has both


def test_a_step_before_the_line_was_written_is_told_after_it(backend: ClockBackend) -> None:
    meter = StepTimer(backend)
    for seconds in (1.0, 4.0):
        if seconds == 4.0:
            meter.since_last()
        start = backend.mark()
        backend.work(seconds)
        meter.span(start, backend.mark())
    assert meter.take()[0] == 5.0
    assert meter.since_last() == 4.0
    start = backend.mark()
    backend.work(0.5)
    meter.span(start, backend.mark())
    assert meter.since_last() == 0.5
    assert meter.take()[0] == 0.5


class _Meets(torch.autograd.Function):
    """Works 1 s, waits 5 s for other ranks and works 2 s, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, backend: ClockBackend) -> torch.Tensor:
        ctx.backend = backend
        _Meets.work(backend)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _Meets.work(ctx.backend)
        return gradients[0], None

    @staticmethod
    def work(backend: ClockBackend) -> None:
        backend.work(1.0)
        with backend.waiting():
            backend.work(5.0)
        backend.work(2.0)


def test_waiting_for_others_within_a_pass_is_no_work() -> None:
    backend = ClockBackend()
    meters = [StepTimer(backend), StepTimer(backend)]
    for meter in meters:  # one may be read after another has begun
        start = backend.mark()
        output = _Meets.apply(torch.ones(1, requires_grad=True), backend)  # type: ignore[no-untyped-call]
        meter.span(start, backend.mark())
        meter.backward(output.sum())
    for meter in meters:
        assert meter.since_last() == pytest.approx(6.0)
        compute, waited, _ = meter.take()
        assert [compute, waited] == pytest.approx([6.0, 10.0])

"""A real device made slower: it idles in proportion to the work that it really did."""

from __future__ import annotations

import pytest
import torch
from fake_clock import Clock, Working
from torch import nn

from hetexp.hardware import pacing
from hetexp.hardware.pacing import Slowdown
from hetexp.strategy.empty_share import EmptyShareGuard


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(pacing, "time", fake)
    return fake


class Slowed:
    """Two layers that work 2 s and 3 s forward, 5 s and 7 s backward, on a device of changing speed."""

    def __init__(self, clock: Clock, factor: float) -> None:
        self.factor, self.synchronized = factor, 0
        self.layers = first, second = Working(4, clock), Working(4, clock)
        first.forward_seconds, first.backward_seconds = 2.0, 5.0
        second.forward_seconds, second.backward_seconds = 3.0, 7.0
        self.model = nn.Sequential(first, second)
        Slowdown(self.model, lambda: self.factor, self._synchronize)

    def _synchronize(self) -> None:
        self.synchronized += 1


def test_each_stretch_of_work_is_stretched(clock: Clock) -> None:
    slowed = Slowed(clock, 3.0)
    start = clock.now
    output = slowed.model(torch.zeros(2, 4))
    assert clock.now - start == pytest.approx(3.0 * 5.0)
    assert clock.slept == [pytest.approx(2.0 * 5.0)]
    clock.work(100.0)  # the loss, or a wait for others: not the device's work
    start = clock.now
    output.sum().backward()
    assert clock.now - start == pytest.approx(3.0 * 12.0)
    # After the later layer first, so that its gradient is not sent too early.
    assert clock.slept[1:] == pytest.approx([2.0 * 7.0, 2.0 * 5.0])
    assert slowed.synchronized > 0


def test_no_gradient_leaves_before_its_time(clock: Clock) -> None:
    slowed = Slowed(clock, 3.0)
    left: list[float] = []
    for layer in slowed.layers:  # hooked afterwards, as DDP's are
        layer.linear.weight.register_hook(lambda _: left.append(clock.now))
    output = slowed.model(torch.zeros(2, 4))
    start = clock.now
    output.sum().backward()
    assert [moment - start for moment in left] == pytest.approx([3.0 * 7.0, 3.0 * 12.0])


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_device_at_its_own_speed_never_idles(clock: Clock, factor: float) -> None:
    slowed = Slowed(clock, factor)
    start = clock.now
    slowed.model(torch.zeros(2, 4)).sum().backward()
    assert clock.slept == []
    assert clock.now - start == pytest.approx(5.0 + 12.0)


def test_the_factor_is_asked_in_every_step(clock: Clock) -> None:
    slowed = Slowed(clock, 1.0)
    took = []
    for factor in (1.0, 2.0, 4.0, 1.0):
        slowed.factor = factor
        clock.work(50.0)
        start = clock.now
        slowed.model(torch.zeros(2, 4)).sum().backward()
        took.append(clock.now - start)
    assert took == pytest.approx([17.0, 34.0, 68.0, 17.0])


def test_gradients_are_the_same(clock: Clock) -> None:
    slowed = Slowed(clock, 3.0)
    plain = nn.Sequential(Working(4, clock), Working(4, clock))
    plain.load_state_dict(slowed.model.state_dict())
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    for model in (slowed.model, plain):
        model(inputs).square().sum().backward()
    pairs = list(zip(slowed.model.parameters(), plain.parameters(), strict=True))
    assert len(pairs) == 4
    for one, other in pairs:
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_evaluation_is_slowed_too(clock: Clock) -> None:
    slowed = Slowed(clock, 3.0)
    start = clock.now
    with torch.inference_mode():
        slowed.model(torch.zeros(2, 4))
    assert clock.now - start == pytest.approx(3.0 * 5.0)


def test_a_share_that_was_always_empty_takes_no_time(clock: Clock) -> None:
    slowed = Slowed(clock, 3.0)
    start = clock.now
    EmptyShareGuard(slowed.model)(None).backward()
    assert clock.now == start


def test_an_empty_share_does_not_stretch_the_wait_before_it(clock: Clock) -> None:
    slowed = Slowed(clock, 3.0)
    guard = EmptyShareGuard(slowed.model)
    guard(torch.zeros(2, 4)).sum().backward()
    clock.work(60.0)  # the exchange, an evaluation, the next step's wait
    start = clock.now
    guard(None).backward()
    assert clock.now == start

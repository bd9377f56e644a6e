"""A real device made slower: it idles in proportion to the work that it really did."""

from __future__ import annotations

import pytest
import torch
from fake_clock import Clock, Working
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.hardware.emulation.pacing import STRETCHES, Slowdown, spread_out


class Slowed:
    """Two layers that work 2 s and 3 s forward, 5 s and 7 s backward, on a device of changing speed."""

    def __init__(self, clock: Clock, factor: float) -> None:
        self.factor, self.waited = factor, 0
        self._clock = clock
        self.layers = first, second = Working(4, clock), Working(4, clock)
        first.forward_seconds, first.backward_seconds = 2.0, 5.0
        second.forward_seconds, second.backward_seconds = 3.0, 7.0
        self.model = nn.Sequential(first, second)
        Slowdown(self.model, lambda: self.factor, self)

    def mark(self) -> float:
        return self._clock.now

    def wait(self, mark: float) -> None:
        self.waited += 1

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


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
    assert slowed.waited > 0


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


def test_a_deep_model_idles_after_few_stretches(clock: Clock) -> None:
    layers = [Working(4, clock) for _ in range(40)]
    for layer in layers:
        layer.forward_seconds, layer.backward_seconds = 0.5, 1.0
    slowed = Slowed(clock, 3.0)
    slowed.model = nn.Sequential(*layers)
    Slowdown(slowed.model, lambda: slowed.factor, slowed)
    output = slowed.model(torch.zeros(2, 4))
    start, slept = clock.now, len(clock.slept)
    output.sum().backward()
    assert clock.now - start == pytest.approx(3.0 * 40.0)
    stretches = [seconds for seconds in clock.slept[slept:] if seconds]
    assert len(stretches) == STRETCHES
    assert max(stretches) <= 2.0 * (40.0 / STRETCHES + 1.0)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60), count=st.integers(1, 10))
def test_parameters_are_spread_over_the_work(sizes: list[int], count: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    chosen = spread_out(parameters, count)
    assert len(chosen) <= count
    assert chosen[-1] is parameters[0]  # whose gradient comes last
    order = [next(i for i, p in enumerate(parameters) if p is one) for one in chosen]
    assert order == sorted(order, reverse=True)
    if len(sizes) <= count:
        assert len(chosen) == len(sizes)
    ends = [sum(sizes[at:]) for at in order]
    assert all(b - a <= sum(sizes) / count + 2 * max(sizes) for a, b in zip([0, *ends], ends, strict=False))


def test_waiting_for_others_within_a_pass_is_not_stretched(clock: Clock) -> None:
    """As `Backend.waiting` does it, between the first layer's work and the second's."""

    class Meeting(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            slowdown.catch_up()
            clock.work(50.0)
            slowdown.go_on()
            return value

    slowed = Slowed(clock, 1.0)
    slowed.model = nn.Sequential(slowed.layers[0], Meeting(), slowed.layers[1])
    slowdown = Slowdown(slowed.model, lambda: 3.0, slowed)
    slowed.model(torch.zeros(2, 4))
    assert clock.slept == [pytest.approx(2.0 * 2.0), pytest.approx(2.0 * 3.0)]

"""Pacing: the work is counted right, and delayed by a clock that the tests turn themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_clock import Clock, Working
from torch import nn

from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.hardware.emulation.pacing import GRAIN_SECONDS, Pacer, count_work, num_samples, tensors
from hetexp.model.mlp import MLP

SAMPLES = 4


@dataclass
class Times:
    """Modelled seconds that are easy to tell apart."""

    fixed: float = 0.0
    per_byte: float = 0.0
    forward_sample: float = 0.25
    backward_sample: float = 0.5
    update_seconds: float = 0.125

    def forward(self, num_samples: int, num_bytes: int) -> float:
        return self.fixed + self.per_byte * num_bytes + self.forward_sample * num_samples

    def backward(self, num_samples: int) -> float:
        return self.fixed + self.backward_sample * num_samples

    def update(self) -> float:
        return self.update_seconds


def mlp(*sizes: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def paced(model: nn.Module, inputs: torch.Tensor, times: Times | None = None) -> Pacer:
    """A pacer as a backend makes it, nothing delayed yet."""
    _, _, fractions = count_work(model, inputs)
    pacer = Pacer()
    pacer.follow(model, times or Times(), fractions)
    return pacer


# ---------------------------------------------------------------- counting


def test_work_of_a_linear_stack_by_hand() -> None:
    forward, backward, _ = count_work(mlp(8, 16, 4), torch.zeros(5, 8))
    assert forward == 2 * 8 * 16 + 2 * 16 * 4
    # Backward computes the weight's gradient of both layers, and the input's of the second only.
    assert backward == 2 * 8 * 16 + 2 * (2 * 16 * 4)


@pytest.mark.parametrize("samples", [1, 3, 64])
def test_work_is_told_a_sample(samples: int) -> None:
    forward, backward, _ = count_work(MLP([32], [4, 2], 3), torch.zeros(samples, 4, 2))
    assert forward == 2 * 8 * 32 + 2 * 32 * 3
    assert backward == 2 * 8 * 32 + 2 * (2 * 32 * 3)


def test_fractions_follow_the_work_of_each_layer() -> None:
    model = mlp(8, 16, 4)
    _, _, fractions = count_work(model, torch.zeros(1, 8))
    by_parameter = {id(p): fraction for p, fraction in fractions}
    first, second = (sum(by_parameter[id(p)] for p in layer.parameters()) for layer in model)
    work_first, work_second = 2 * (2 * 8 * 16), 3 * (2 * 16 * 4)  # forward and backward
    assert first == pytest.approx(work_first / (work_first + work_second))
    assert second == pytest.approx(work_second / (work_first + work_second))


class Tied(nn.Module):
    """The embedding is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.middle(self.embedding(tokens)))
        return logits


class OwnParameter(nn.Module):
    """Has children, and a parameter of its own beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(value) * self.scale
        return output


def half_frozen() -> nn.Module:
    model = mlp(3, 3, 3)
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: mlp(3, 5, 2), torch.zeros(2, 3)),
        (Tied, torch.zeros(2, 4, dtype=torch.int64)),
        (OwnParameter, torch.zeros(2, 3)),
        (half_frozen, torch.zeros(2, 3)),
        (
            lambda: nn.Sequential(nn.Embedding(5, 3)),
            torch.zeros(2, 4, dtype=torch.int64),
        ),  # no counted work at all
        (lambda: nn.Linear(3, 2), torch.zeros(2, 3)),
    ],
    ids=["mlp", "tied", "own parameter", "half frozen", "embedding", "single layer"],
)
def test_fractions_sum_to_one_over_the_trainable_parameters(
    make: Callable[[], nn.Module], inputs: torch.Tensor
) -> None:
    model = make()
    _, _, fractions = count_work(model, inputs)
    assert sum(fraction for _, fraction in fractions) == pytest.approx(1.0)
    assert all(fraction >= 0 for _, fraction in fractions)
    counted = [id(parameter) for parameter, _ in fractions]
    assert sorted(counted) == sorted(id(p) for p in model.parameters() if p.requires_grad)  # tied ones once


class Noisy(nn.Module):
    """Draws random numbers whether it trains or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(value + torch.randn_like(value))
        return output


def test_counting_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[0].weight.grad = torch.full((3, 3), 7.0)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    generator = torch.get_rng_state()
    count_work(model, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(model[0].weight.grad, torch.full((3, 3), 7.0))
    assert model[0].bias.grad is None
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.modules()] == [True] * 4


def test_counting_keeps_the_mode_of_every_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].eval()  # statistics that a person froze
    count_work(model, torch.zeros(4, 3))
    assert [module.training for module in model.modules()] == [True, True, False]


def test_counting_draws_no_random_numbers() -> None:
    model = Noisy()
    generator = torch.get_rng_state()
    count_work(model, torch.zeros(4, 3))
    assert torch.equal(torch.get_rng_state(), generator)


def test_nested_tensors_and_samples() -> None:
    a, b = torch.zeros(5, 2), torch.zeros(3)
    assert [id(t) for t in tensors({"x": [a, (b,)], "y": None})] == [id(a), id(b)]
    assert num_samples((a, {})) == 5
    assert num_samples(((), {"ids": b})) == 3
    assert num_samples(()) == 0


# ---------------------------------------------------------------- pacing


def test_nothing_is_delayed_before_pacing_starts(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    pacer = paced(model, torch.zeros(2, 8))
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    pacer.begin_update()
    pacer.end_update()
    assert clock.slept == []
    assert pacer.paced == []
    assert pacer.late_share == 0.0


@pytest.mark.parametrize("scale", [1.0, 250.0])
def test_phases_take_the_modelled_time(clock: Clock, scale: float) -> None:
    model = mlp(8, 16, 4)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(scale)
    moments = [clock.now]
    output = model(torch.zeros(SAMPLES, 8))
    moments.append(clock.now)
    output.sum().backward()
    moments.append(clock.now)
    pacer.begin_update()
    pacer.end_update()
    moments.append(clock.now)
    took = [end - start for start, end in itertools.pairwise(moments)]
    expected = [scale * seconds for seconds in (1.0, 2.0, 0.125)]
    assert took == pytest.approx(expected, rel=1e-6)
    assert [name for name, _, _ in pacer.paced] == ["forward", "backward", "update"]
    assert [real for _, real, _ in pacer.paced] == pytest.approx(expected, rel=1e-6)
    assert [modelled for _, _, modelled in pacer.paced] == expected
    assert pacer.late_share == 0.0


def test_the_card_is_told_samples_and_bytes(clock: Clock) -> None:
    model = MLP([16], [2, 4], 3)
    paced(model, torch.zeros(2, 2, 4), Times(fixed=1.0, per_byte=1e-3)).start(10.0)
    took = []
    for samples in (1, 64):
        start = clock.now
        model(torch.zeros(samples, 2, 4))
        took.append(clock.now - start)
    assert took == pytest.approx([10 * (1 + 4 * 8 * n * 1e-3 + 0.25 * n) for n in (1, 64)], rel=1e-6)


def test_bytes_of_keyword_arguments_count(clock: Clock) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.linear(x) * scale[:, None]
            return output

    model = Scaled()
    times = Times(forward_sample=0.0, per_byte=1e-3)
    _, _, fractions = count_work(model, {"x": torch.zeros(2, 4), "scale": torch.ones(2)})
    pacer = Pacer()
    pacer.follow(model, times, fractions)
    pacer.start(1.0)
    start = clock.now
    model(x=torch.zeros(3, 4), scale=torch.ones(3, dtype=torch.float64))
    assert clock.now - start == pytest.approx(1e-3 * (3 * 4 * 4 + 3 * 8))


def test_real_work_is_part_of_the_modelled_time(clock: Clock) -> None:
    working = Working(8, clock)
    model = nn.Sequential(working, nn.Linear(8, 8))
    paced(model, torch.zeros(2, 8)).start(1.0)
    working.forward_seconds = 0.3
    start = clock.now
    model(torch.zeros(SAMPLES, 8))
    assert clock.now - start == pytest.approx(1.0)
    assert clock.slept == [pytest.approx(0.7)]


def test_what_the_host_does_is_part_of_the_update(clock: Clock) -> None:
    model = mlp(8, 4)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(8.0)  # an update takes one second
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    start = clock.now
    pacer.begin_update()
    clock.work(0.75)
    pacer.end_update()
    assert clock.now - start == pytest.approx(1.0)
    assert clock.slept[-1] == pytest.approx(0.25)


def test_an_update_ends_once(clock: Clock) -> None:
    model = mlp(8, 4)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(8.0)
    pacer.end_update()  # before the first step there is none
    assert clock.slept == [] and pacer.paced == []
    pacer.begin_update()
    pacer.end_update()
    clock.work(5.0)
    pacer.end_update()
    assert [name for name, _, _ in pacer.paced] == ["update"]
    assert pacer.late_share == 0.0


def test_what_comes_between_two_steps_is_no_update(clock: Clock) -> None:
    model = mlp(8, 4)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(8.0)
    pacer.begin_update()
    clock.work(60.0)  # an evaluation
    pacer.forget()
    pacer.end_update()
    assert pacer.paced == []
    assert pacer.late_share == 0.0


def test_no_gradient_leaves_before_its_share_of_the_work(clock: Clock) -> None:
    model = mlp(8, 16, 32, 4)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(0.5)  # a backward pass takes one second
    # Hooked after the device, as DDP's are: this is when a bucket may be sent.
    left: list[tuple[int, float, float]] = []
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    for number, weight in enumerate(weights):
        weight.register_hook(lambda _, number=number: left.append((number, clock.now, pacer.backward_done)))
    output = model(torch.zeros(SAMPLES, 8))
    start = clock.now
    output.sum().backward()
    assert [number for number, _, _ in left] == [2, 1, 0]
    times = [time - start for _, time, _ in left]
    assert times == sorted(times)
    assert [done for _, _, done in left] == pytest.approx(times)
    work = [2 * (2 * 8 * 16), 3 * (2 * 16 * 32), 3 * (2 * 32 * 4)]
    for (number, _, _), time in zip(left, times, strict=True):
        before = sum(work[number + 1 :])  # what later layers did, and half of its own layer at least
        assert time >= (before + work[number] / 2) / sum(work) - 1e-9
    assert clock.now - start == pytest.approx(1.0)
    assert pacer.backward_done == 1.0


def test_each_gradient_leaves_at_its_share_of_the_work(clock: Clock) -> None:
    """Not at the end of backward: an exchange overlaps with the rest of the work, as on the card."""
    model = mlp(8, 16, 4)
    inputs = torch.randn(SAMPLES, 8)
    pacer = paced(model, inputs)
    done: list[float] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: done.append(pacer.backward_done))
    pacer.start(1.0)
    model(inputs).sum().backward()
    assert len(done) == 4
    assert done == sorted(done)
    assert 0.2 < done[1] < 0.8  # the second layer's work is over, and the first one's is not
    assert done[-1] == pytest.approx(1.0)


def test_a_wait_for_other_ranks_inside_a_pass_is_no_work(clock: Clock) -> None:
    class Waits(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            clock.work(5.0)
            pacer.put_off(5.0)
            return super().forward(inputs)

    model, inputs = Waits(8, 4), torch.randn(SAMPLES, 8)
    pacer = Pacer()
    pacer.follow(model, Times(), [(p, 0.5) for p in model.parameters()])
    pacer.start(1.0)
    begun = clock.now
    model(inputs)
    assert clock.now - begun == pytest.approx(5.0 + 0.25 * SAMPLES)  # the wait, and the pass besides
    assert pacer.late_share == 0.0


def test_gradients_of_paced_passes_are_the_same(clock: Clock) -> None:
    torch.manual_seed(0)
    model, inputs = mlp(8, 16, 4), torch.randn(SAMPLES, 8)
    model(inputs).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    paced(model, torch.zeros(2, 8)).start(10.0)
    model(inputs).square().sum().backward()
    delayed = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(delayed) == len(plain) == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, delayed, strict=True))
    assert clock.slept


def test_a_parameter_without_a_gradient_leaves_no_time_out(clock: Clock) -> None:
    model = OwnParameter()
    paced(model, torch.zeros(2, 3)).start(100.0)
    output = model(torch.zeros(SAMPLES, 3))
    start = clock.now
    output.sum().backward()
    assert clock.now - start == pytest.approx(200.0)


def test_tied_weights_take_the_modelled_time_once(clock: Clock) -> None:
    model = Tied()
    tokens = torch.zeros(SAMPLES, 2, dtype=torch.int64)
    paced(model, tokens).start(100.0)
    output = model(tokens)
    start = clock.now
    output.sum().backward()
    assert clock.now - start == pytest.approx(200.0)


def test_every_microbatch_is_paced(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(1.0)
    start = clock.now
    for samples in (1, 2, 3):
        model(torch.zeros(samples, 8)).sum().backward()
    assert clock.now - start == pytest.approx(0.75 * 6)
    assert [name for name, _, _ in pacer.paced] == ["forward", "backward"] * 3


def test_an_empty_share_takes_no_time(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(100.0)
    guard = EmptyShareGuard(model)
    guard(torch.zeros(SAMPLES, 8)).sum().backward()
    start = clock.now
    guard(None).backward()
    assert clock.now == start
    assert pacer.late_share == 0.0


def test_a_share_that_was_always_empty_takes_no_time(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(100.0)
    start = clock.now
    EmptyShareGuard(model)(None).backward()
    assert clock.now == start
    assert pacer.paced == []


def test_evaluation_is_paced_too_and_leaves_no_hook(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    paced(model, torch.zeros(2, 8)).start(100.0)
    start = clock.now
    with torch.inference_mode():
        model(torch.zeros(SAMPLES, 8))
    assert clock.now - start == pytest.approx(100.0)


# ---------------------------------------------------------------- when the machine cannot keep up


LATE = 0.02
"""A scale may let phases be late by less than this."""


def test_the_slowest_phase_decides_by_its_median(clock: Clock) -> None:
    model = Working(8, clock)
    pacer = paced(model, torch.zeros(2, 8))
    for forward, backward in ((9.0, 1.0), (3.0, 1.0), (2.0, 1.0)):
        model.forward_seconds, model.backward_seconds = forward, backward
        model(torch.zeros(SAMPLES, 8)).sum().backward()
    # Modelled are 1 and 2 seconds; the first forward pass warmed up.
    assert pacer.needed_scale(1.0) == pytest.approx(2.5, rel=LATE)
    assert pacer.needed_scale(2.0) == pytest.approx(5.0, rel=LATE)
    model.backward_seconds = 16.0
    for _ in range(4):
        model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert pacer.needed_scale(1.0) == pytest.approx(8.0, rel=LATE)


def test_at_a_pace_the_usual_work_decides_without_the_delays(clock: Clock) -> None:
    model = Working(8, clock)
    pacer = paced(model, torch.zeros(2, 8))
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    pacer.start(10.0)
    for forward in (9.0, 4.0, 4.0, 8.0):
        model.forward_seconds, model.backward_seconds = forward, 1.0
        model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert pacer.needed_scale(1.0) == pytest.approx(4.0, rel=LATE)
    assert len(pacer.paced) == 8
    pacer.start(4.0)
    assert (pacer.paced, pacer.late_share) == ([], 0.0)
    assert pacer.modelled_seconds == pytest.approx(4 * 3.0)  # energy is counted by them


class Late(torch.autograd.Function):
    """Does nothing forward, and all the real work of a backward pass where it stands."""

    clock: Clock

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Late.clock.work(6.0)
        return gradient


class BetweenLayers(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Late.apply(value)  # type: ignore[no-untyped-call]
        return result


def test_a_gradient_waits_no_longer_than_the_work_behind_it_allows(clock: Clock) -> None:
    """The last layer's gradient would wait for half of the pass; the 6 seconds of work begin only then."""
    Late.clock = clock
    model = nn.Sequential(nn.Linear(8, 8, bias=False), BetweenLayers(), nn.Linear(8, 8, bias=False))
    pacer = paced(model, torch.zeros(2, 8))
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert pacer.needed_scale(1.0) == pytest.approx(3.0, rel=LATE)
    for scale in (5.0, 4.0):
        pacer.start(scale)
        started = clock.now
        model(torch.zeros(SAMPLES, 8)).sum().backward()
        assert clock.now - started == pytest.approx(3.0 * scale)  # 1 and 2 modelled seconds
        assert pacer.late_share == 0.0


def test_a_short_phase_does_not_slow_down_all_others(clock: Clock) -> None:
    """An update of a few milliseconds may be late: that is a small part of the step."""
    model = Working(8, clock)
    model.forward_seconds, model.backward_seconds = 200.0, 400.0
    pacer = paced(model, torch.zeros(2, 8))
    for _ in range(3):
        model(torch.zeros(SAMPLES, 8)).sum().backward()
        pacer.begin_update()
        clock.work(26.0)  # in time at a scale of 208
        pacer.end_update()
    assert pacer.needed_scale(1.0) == pytest.approx(200.0, rel=LATE)


def test_an_update_counts_in_the_rehearsal(clock: Clock) -> None:
    pacer = paced(mlp(8, 4), torch.zeros(2, 8))
    assert pacer.needed_scale(1.0) == 0.0
    pacer.begin_update()
    clock.work(0.5)
    pacer.end_update()
    assert pacer.needed_scale(1.0) == pytest.approx(4.0, rel=LATE)


def test_lateness_is_a_share_of_all_modelled_time(clock: Clock) -> None:
    model = Working(8, clock)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(1.0)
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert pacer.late_share == 0.0
    model.forward_seconds = 1.6
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert pacer.late_share == pytest.approx((0.6 - GRAIN_SECONDS) / 6)
    # What is early does not make up for what is late: nothing can end early.
    model.forward_seconds = 0.0
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert pacer.late_share == pytest.approx((0.6 - GRAIN_SECONDS) / 9)


def test_a_grain_late_is_on_time(clock: Clock) -> None:
    model = Working(8, clock)
    pacer = paced(model, torch.zeros(2, 8))
    pacer.start(1.0)
    model.forward_seconds = 1.0 + 0.9 * GRAIN_SECONDS
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert pacer.late_share == 0.0


def test_the_pace_changes_with_the_card(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    times = Times()
    paced(model, torch.zeros(2, 8), times).start(1.0)
    took = []
    for sample in (0.25, 1.0):
        times.forward_sample = sample
        start = clock.now
        model(torch.zeros(SAMPLES, 8))
        took.append(clock.now - start)
    assert took == pytest.approx([1.0, 4.0])


# ---------------------------------------------------------------- pieces of a pipeline


def test_a_backward_pass_is_that_of_its_own_microbatch(clock: Clock) -> None:
    """Of a pipeline, whose forward passes run ahead."""
    model = mlp(8, 4)
    paced(model, torch.zeros(1, 8)).start(1.0)
    first, second = model(torch.zeros(5, 8)), model(torch.zeros(2, 8))
    began = clock.now
    first.sum().backward()
    assert clock.now - began == pytest.approx(5 * 0.5)
    second.sum().backward()
    assert clock.now - began == pytest.approx(5 * 0.5 + 2 * 0.5)


def test_a_pacer_follows_several_pieces(clock: Clock) -> None:
    one, other = mlp(8, 4), mlp(4, 2)
    pacer = paced(one, torch.zeros(1, 8))
    pacer.follow(other, Times(forward_sample=1.0), count_work(other, torch.zeros(1, 4))[2])
    pacer.start(1.0)
    began = clock.now
    other(one(torch.zeros(3, 8)))
    assert clock.now - began == pytest.approx(3 * 0.25 + 3 * 1.0)


def test_what_goes_to_the_piece_before_is_counted() -> None:
    model = mlp(8, 16, 4)
    _, alone, _ = count_work(model, torch.zeros(5, 8))
    _, asked, _ = count_work(model, torch.zeros(5, 8, requires_grad=True))
    assert asked - alone == 2 * 8 * 16

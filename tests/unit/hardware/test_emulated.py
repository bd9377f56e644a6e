"""Emulated cards: the work is counted right, and paced by a clock that the tests turn themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hetexp.hardware import emulated
from hetexp.hardware.catalogue import card
from hetexp.hardware.emulated import EmulatedBackend, count_work, num_samples, tensors
from hetexp.model.mlp import MLP
from hetexp.strategy.empty_share import EmptyShareGuard

SAMPLES = 4
MODELLED = card("rtx_3090")


class Clock:
    """Stands in for the `time` module: only sleeping and `work` move it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds

    def work(self, seconds: float) -> None:
        """Pass time as real arithmetic would."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(emulated, "time", fake)
    return fake


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, forward: Callable[[], None], backward: Callable[[], None]
    ) -> torch.Tensor:
        ctx.backward_work = backward
        forward()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.backward_work()
        return gradients[0], None, None


class Working(nn.Module):
    """A layer whose real work takes time on the fake clock, forward and backward."""

    def __init__(self, width: int, clock: Clock) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.clock, self.forward_seconds, self.backward_seconds = clock, 0.0, 0.0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Work.apply(  # type: ignore[no-untyped-call]
            self.linear(value),
            lambda: self.clock.work(self.forward_seconds),
            lambda: self.clock.work(self.backward_seconds),
        )
        return output


def mlp(*sizes: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def attached(model: nn.Module, width: int) -> EmulatedBackend:
    backend = EmulatedBackend(EmulatedBackend.describe_card(0, "rtx_3090"))
    backend.attach(model, torch.zeros(2, width))
    return backend


def seconds(flops_per_sample: float, samples: int = SAMPLES) -> float:
    return MODELLED.compute_seconds(flops_per_sample * samples, "float32")


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
    attached(model, 8)
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert clock.slept == []


@pytest.mark.parametrize("scale", [1.0, 250.0])
def test_passes_take_the_modelled_time(clock: Clock, scale: float) -> None:
    model = mlp(8, 16, 4)
    backend = attached(model, 8)
    backend.start_pacing(scale)
    start = clock.now
    output = model(torch.zeros(SAMPLES, 8))
    forward = clock.now - start
    assert forward == pytest.approx(scale * seconds(2 * 8 * 16 + 2 * 16 * 4), rel=1e-6)
    start = clock.now
    output.sum().backward()
    assert clock.now - start == pytest.approx(scale * seconds(2 * 8 * 16 + 4 * 16 * 4), rel=1e-6)
    assert backend.invalid_reason() is None


def test_more_samples_take_longer(clock: Clock) -> None:
    model = mlp(8, 512, 512, 4)
    attached(model, 8).start_pacing(1000.0)
    took = []
    for samples in (1, 64):
        start = clock.now
        model(torch.zeros(samples, 8))
        took.append(clock.now - start)
    flops = 2 * (8 * 512 + 512 * 512 + 512 * 4)
    assert took == pytest.approx([1000.0 * seconds(flops, samples) for samples in (1, 64)], rel=1e-6)


def test_real_work_is_part_of_the_modelled_time(clock: Clock) -> None:
    working = Working(8, clock)
    model = nn.Sequential(working, nn.Linear(8, 8))
    backend = attached(model, 8)
    scale = 1.0 / seconds(2 * 2 * 8 * 8)  # a forward pass takes one second
    backend.start_pacing(scale)
    working.forward_seconds = 0.3
    start = clock.now
    model(torch.zeros(SAMPLES, 8))
    assert clock.now - start == pytest.approx(1.0)
    assert clock.slept == [pytest.approx(0.7)]


def test_no_gradient_leaves_before_its_share_of_the_work(clock: Clock) -> None:
    model = mlp(8, 16, 32, 4)
    backend = attached(model, 8)
    backward_flops = 2 * 8 * 16 + 2 * (2 * 16 * 32) + 2 * (2 * 32 * 4)
    allowed = seconds(backward_flops)
    scale = 1.0 / allowed  # a backward pass takes one second
    backend.start_pacing(scale)
    # Hooked after the device, as DDP's are: this is when a bucket may be sent.
    left: list[tuple[int, float]] = []
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    for number, weight in enumerate(weights):
        weight.register_hook(lambda _, number=number: left.append((number, clock.now)))
    output = model(torch.zeros(SAMPLES, 8))
    start = clock.now
    output.sum().backward()
    assert [number for number, _ in left] == [2, 1, 0]
    times = [time - start for _, time in left]
    assert times == sorted(times)
    work = [2 * (2 * 8 * 16), 3 * (2 * 16 * 32), 3 * (2 * 32 * 4)]
    for (number, _), time in zip(left, times, strict=True):
        before = sum(work[number + 1 :])  # what later layers did, and half of its own layer at least
        assert time >= (before + work[number] / 2) / sum(work) - 1e-9
    assert clock.now - start == pytest.approx(1.0)


def test_gradients_of_paced_passes_are_the_same(clock: Clock) -> None:
    torch.manual_seed(0)
    model, inputs = mlp(8, 16, 4), torch.randn(SAMPLES, 8)
    model(inputs).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    attached(model, 8).start_pacing(10.0)
    model(inputs).square().sum().backward()
    paced = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(paced) == len(plain) == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, paced, strict=True))


def test_a_parameter_without_a_gradient_leaves_no_time_out(clock: Clock) -> None:
    model = OwnParameter()
    attached(model, 3).start_pacing(1e4)
    output = model(torch.zeros(SAMPLES, 3))
    start = clock.now
    output.sum().backward()
    assert clock.now - start == pytest.approx(1e4 * seconds(2 * 3 * 3), rel=1e-6)


def test_tied_weights_take_the_modelled_time_once(clock: Clock) -> None:
    model = Tied()
    backend = EmulatedBackend(EmulatedBackend.describe_card(0, "rtx_3090"))
    tokens = torch.zeros(SAMPLES, 2, dtype=torch.int64)
    _, backward, _ = count_work(model, tokens)
    backend.attach(model, tokens)
    backend.start_pacing(1e4)
    output = model(tokens)
    start = clock.now
    output.sum().backward()
    assert clock.now - start == pytest.approx(1e4 * seconds(backward), rel=1e-6)


def test_an_empty_share_takes_no_time(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    backend = attached(model, 8)
    backend.start_pacing(1e4)
    guard = EmptyShareGuard(model)
    guard(torch.zeros(SAMPLES, 8)).sum().backward()
    start = clock.now
    guard(None).backward()
    assert clock.now == start
    assert backend.invalid_reason() is None


def test_evaluation_is_paced_too_and_leaves_no_hook(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    attached(model, 8).start_pacing(1e4)
    start = clock.now
    with torch.inference_mode():
        model(torch.zeros(SAMPLES, 8))
    assert clock.now - start == pytest.approx(1e4 * seconds(2 * 8 * 16 + 2 * 16 * 4), rel=1e-6)


# ---------------------------------------------------------------- when the machine cannot keep up


def test_the_rehearsal_finds_the_slowest_pass(clock: Clock) -> None:
    model = Working(8, clock)
    backend = attached(model, 8)
    model.forward_seconds, model.backward_seconds = 3.0, 1.0
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    model.forward_seconds = 0.0
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    slowest = 3.0 / seconds(2 * 8 * 8)
    needed = backend.rehearsal_scale()
    assert needed == pytest.approx(slowest * emulated.SCALE_MARGIN, rel=1e-6)
    # With the scale that it asks for, the same work is never late.
    assert needed is not None
    backend.start_pacing(needed)
    model.forward_seconds = 3.0
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert backend.invalid_reason() is None


def test_an_outrun_emulation_is_called_invalid(clock: Clock) -> None:
    model = Working(8, clock)
    backend = attached(model, 8)
    allowed = seconds(2 * 8 * 8)  # forward and backward do the same work here
    backend.start_pacing(1.0 / allowed)
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert backend.invalid_reason() is None
    model.forward_seconds = 1.5  # half a second late of four modelled ones
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    reason = backend.invalid_reason()
    assert reason is not None
    assert "emulated:0" in reason
    assert "12% longer" in reason
    assert "`hardware.time_scale`" in reason


def test_a_little_late_is_forgiven(clock: Clock) -> None:
    model = Working(8, clock)
    backend = attached(model, 8)
    backend.start_pacing(1.0 / seconds(2 * 8 * 8))
    model.forward_seconds = 1.0 + emulated.OUTRUN_TOLERANCE
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert backend.invalid_reason() is None


def test_what_an_emulated_device_says_of_itself() -> None:
    spec = EmulatedBackend.describe_card(2, "arc_a770")
    backend = EmulatedBackend(spec)
    assert EmulatedBackend.detect() == []
    assert (spec.id, spec.vendor, spec.emulated) == ("emulated:2", "intel", True)
    assert backend.peak_memory_bytes() is None
    assert backend.invalid_reason() is None
    assert backend.torch_device() == torch.device("cpu")
    assert EmulatedBackend.environment(spec) == {"CUDA_VISIBLE_DEVICES": ""}

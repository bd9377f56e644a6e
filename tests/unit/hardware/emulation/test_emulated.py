"""Emulated cards: their modelled times by hand, and what happens in a step in which order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from fake_clock import Clock, Working
from torch import nn

from hetexp.core.config import FaultEvent
from hetexp.core.device import GIB
from hetexp.core.fault import FaultSchedule
from hetexp.hardware.backend import StagePasses
from hetexp.hardware.catalogue import card
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.emulation import emulated, ordered_faults, pacing
from hetexp.hardware.emulation.deviation import FACTOR_RANGE, Deviation
from hetexp.hardware.emulation.emulated import CardTimes, EmulatedBackend
from hetexp.hardware.emulation.memory_model import CONTEXT_BYTES

SAMPLES = 4
CARD = card("rtx_3090")
PCIE4_X16 = 31.508e9 * 0.8
"""Bytes a second."""
RATE = 35.58e12 * 0.45
"""Operations a second in float32."""
OVERHEAD = LATENCY = 1e-5
MEMORY = 936.2e9
"""Bytes a second."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(pacing, "time", fake)
    monkeypatch.setattr(ordered_faults, "time", fake)
    return fake


def mlp(*sizes: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def attached(model: nn.Module, width: int, seed: int | None = None, **changes: Any) -> EmulatedBackend:
    spec = dataclasses.replace(EmulatedBackend.describe_card(0, card("rtx_3090")), **changes)
    backend = EmulatedBackend(spec)
    backend.deviation_seed = seed
    backend.attach(model, torch.optim.AdamW(model.parameters()), torch.zeros(2, width))
    return backend


def event(kind: str, **values: Any) -> FaultEvent:
    return FaultEvent.model_validate({"kind": kind, "device": "emulated:0", **values})


# ---------------------------------------------------------------- the card's times


def test_a_forward_pass_by_hand() -> None:
    """Inputs over the link, the fixed cost, and the arithmetic at what training reaches of the peak."""
    times = CardTimes(CARD, "float32", 3e9, 6e9, 0.0)
    expected = LATENCY + 5e6 / PCIE4_X16 + OVERHEAD + 16 * 3e9 / RATE
    assert times.forward(16, 5_000_000) == pytest.approx(expected, rel=1e-9)


def test_a_backward_pass_by_hand() -> None:
    times = CardTimes(CARD, "float32", 3e9, 6e9, 0.0)
    assert times.backward(16) == pytest.approx(OVERHEAD + 16 * 6e9 / RATE, rel=1e-9)


def test_an_update_by_hand() -> None:
    times = CardTimes(CARD, "float32", 3e9, 6e9, 28e6)
    assert times.update() == pytest.approx(OVERHEAD + 28e6 / MEMORY, rel=1e-9)


def test_the_rate_is_that_of_the_precision() -> None:
    times = CardTimes(CARD, "float64", 3e9, 6e9, 0.0)
    assert times.backward(1) == pytest.approx(OVERHEAD + 6e9 / (0.556e12 * 0.45), rel=1e-9)


def test_efficiency_and_overhead_are_the_cards_own() -> None:
    other = CARD.model_copy(update={"efficiency": 0.9, "overhead_seconds": 1e-3})
    times = CardTimes(other, "float32", 3e9, 6e9, 0.0)
    assert times.backward(2) == pytest.approx(1e-3 + 12e9 / (35.58e12 * 0.9), rel=1e-9)
    assert times.update() == pytest.approx(1e-3)


def test_a_slower_moment_slows_the_card_and_not_its_link() -> None:
    times = CardTimes(CARD, "float32", 3e9, 6e9, 28e6)
    before = times.forward(16, 5_000_000), times.backward(16), times.update()
    times.slower = 3.0
    link = LATENCY + 5e6 / PCIE4_X16
    assert times.forward(16, 5_000_000) == pytest.approx(link + 3 * (before[0] - link))
    assert times.backward(16) == pytest.approx(3 * before[1])
    assert times.update() == pytest.approx(3 * before[2])


def test_a_deviation_changes_the_arithmetic_and_not_the_link() -> None:
    link = LATENCY + 5e6 / PCIE4_X16
    deviating = CardTimes(CARD, "float32", 3e9, 6e9, 28e6, Deviation(7, 0))
    truth = Deviation(7, 0)
    forward = truth.seconds(OVERHEAD, 3e9 / RATE, 16)
    backward = truth.seconds(OVERHEAD, 6e9 / RATE, 16)
    assert deviating.forward(16, 5_000_000) == pytest.approx(link + forward, rel=1e-9)
    assert deviating.backward(16) == pytest.approx(backward, rel=1e-9)


# ---------------------------------------------------------------- the model on the card


def flops(*sizes: int) -> tuple[int, int]:
    """Multiply-adds count twice; backward leaves out the gradient of the first layer's inputs."""
    layers = [2 * a * b for a, b in itertools.pairwise(sizes)]
    return sum(layers), layers[0] + 2 * sum(layers[1:])


@pytest.mark.parametrize("scale", [1.0, 250.0])
def test_a_step_takes_the_modelled_time(clock: Clock, scale: float) -> None:
    sizes = (8, 512, 512, 4)
    forward, backward = flops(*sizes)
    parameters = 8 * 512 + 512 + 512 * 512 + 512 + 512 * 4 + 4
    model = mlp(*sizes)
    backend = attached(model, 8)
    backend.start_pacing(scale)
    moments = [clock.now]
    backend.begin_step(0)
    output = model(torch.zeros(SAMPLES, 8))
    moments.append(clock.now)
    output.sum().backward()
    moments.append(clock.now)
    backend.begin_update()
    backend.begin_step(1)
    moments.append(clock.now)
    expected = [
        LATENCY + SAMPLES * 8 * 4 / PCIE4_X16 + OVERHEAD + SAMPLES * forward / RATE,
        OVERHEAD + SAMPLES * backward / RATE,
        # AdamW reads weight, gradient and two moments, and writes three of them.
        OVERHEAD + 7 * 4 * parameters / MEMORY,
    ]
    took = [end - start for start, end in itertools.pairwise(moments)]
    assert took == pytest.approx([scale * seconds for seconds in expected], rel=1e-5)
    assert [name for name, _, _ in backend.paced()] == ["forward", "backward", "update"]
    assert backend.invalid_reason() is None
    work = backend.modelled_work([SAMPLES, SAMPLES], 32)
    assert work.forward == pytest.approx([expected[0]] * 2)
    assert work.backward == pytest.approx([expected[1]] * 2)
    assert work.update == pytest.approx(expected[2])


def test_a_device_without_samples_has_no_passes() -> None:
    work = attached(mlp(8, 4), 8).modelled_work([], 32)
    assert work.forward == work.backward == ()
    assert work.update > 0


def test_frozen_weights_are_not_updated() -> None:
    model = mlp(8, 512, 4)
    model[0].requires_grad_(False)
    update = attached(model, 8).modelled_work([], 32).update
    assert update == pytest.approx(OVERHEAD + 7 * 4 * (512 * 4 + 4) / MEMORY)


def test_double_precision_is_paced_at_its_own_rate() -> None:
    model = mlp(8, 512, 512, 4).double()
    backend = EmulatedBackend(EmulatedBackend.describe_card(0, card("rtx_3090")))
    backend.attach(model, torch.optim.SGD(model.parameters()), torch.zeros(2, 8, dtype=torch.float64))
    _, backward = flops(8, 512, 512, 4)
    expected = OVERHEAD + SAMPLES * backward / (0.556e12 * 0.45)
    assert backend.modelled_work([SAMPLES], 64).backward == pytest.approx([expected])


def test_a_prediction_knows_of_no_deviation(clock: Clock) -> None:
    plain, model = mlp(8, 512, 512, 4), mlp(8, 512, 512, 4)
    known, deviating = attached(plain, 8), attached(model, 8, seed=3)
    assert deviating.modelled_work([16], 32) == known.modelled_work([16], 32)
    ratio = deviating.times[0].backward(1) / known.times[0].backward(1)
    assert 0.95 * FACTOR_RANGE[0] <= ratio <= 1.05 * FACTOR_RANGE[1]
    assert ratio != pytest.approx(1.0, rel=1e-6)
    assert known.times[0].backward(16) == pytest.approx(known.modelled_work([16], 32).backward[0])


# ---------------------------------------------------------------- the order of a step


class Noted:
    """Stands in for the pacer and writes down what it is told."""

    backward_done = 0.25

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def test_a_step_ends_before_its_faults_happen(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = attached(mlp(8, 4), 8)
    calls: list[str] = []
    backend.pacer = Noted(calls)  # type: ignore[assignment]
    monkeypatch.setattr(clock, "sleep", lambda seconds: calls.append(f"stall {seconds:g}"))
    backend.faults = FaultSchedule([event("stall", at_step=1, seconds=2.0)], "emulated:0")
    for step in (0, 1, 2):
        calls.append(f"step {step}")
        backend.begin_step(step)
        backend.begin_update()
    backend.resume()
    assert calls == [
        *("step 0", "end_update", "begin_update"),
        *("step 1", "end_update", "stall 2", "begin_update"),
        *("step 2", "end_update", "begin_update", "forget"),
    ]
    assert backend.backward_done() == 0.25


def test_a_slow_down_is_in_force_from_its_step_on(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    backend = attached(model, 8)
    backend.faults = FaultSchedule([event("slow", at_step=1, until_step=2, factor=3.0)], "emulated:0")
    backend.start_pacing(1e4)
    took = []
    for step in (0, 1, 2):
        backend.begin_step(step)
        output = model(torch.zeros(SAMPLES, 8))
        start = clock.now
        output.sum().backward()
        took.append(clock.now - start)
        backend.begin_update()
    assert took[1] == pytest.approx(3 * took[0], rel=1e-6)
    assert took[2] == pytest.approx(took[0], rel=1e-6)
    assert backend.invalid_reason() is None
    # The prediction is of the card as it is.
    assert backend.modelled_work([SAMPLES], 32).backward[0] * 1e4 == pytest.approx(took[0], rel=1e-6)


def test_a_stall_is_not_the_machines_lateness(clock: Clock) -> None:
    model = mlp(8, 4)
    backend = attached(model, 8)
    backend.faults = FaultSchedule([event("stall", at_step=1, seconds=60.0)], "emulated:0")
    backend.start_pacing(1e4)
    for step in (0, 1):
        start = clock.now
        backend.begin_step(step)
        model(torch.zeros(SAMPLES, 8)).sum().backward()
        backend.begin_update()
    assert clock.now - start > 60.0
    assert backend.invalid_reason() is None


def test_an_evaluation_between_two_steps_is_not_an_update(clock: Clock) -> None:
    model = mlp(8, 4)
    backend = attached(model, 8)
    backend.start_pacing(1e4)
    backend.begin_step(0)
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    backend.begin_update()
    clock.work(60.0)
    backend.resume()
    backend.begin_step(1)
    assert [name for name, _, _ in backend.paced()] == ["forward", "backward"]
    assert backend.invalid_reason() is None


# ---------------------------------------------------------------- when the machine cannot keep up


def test_the_rehearsal_finds_the_slowest_pass(clock: Clock) -> None:
    model = Working(8, clock)
    backend = attached(model, 8)
    model.forward_seconds, model.backward_seconds = 0.01, 3.0
    for _ in range(3):
        backend.begin_step(-1)
        model(torch.zeros(SAMPLES, 8)).sum().backward()
        backend.begin_update()
    needed = backend.rehearsal_scale()
    assert needed is not None
    assert needed == pytest.approx(
        3.0 / (OVERHEAD + SAMPLES * 2 * 8 * 8 / RATE) * emulated.SCALE_MARGIN, rel=0.02
    )
    # With the scale that it asks for, the same work is never late.
    backend.resume()
    backend.start_pacing(needed)
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert backend.invalid_reason() is None


@pytest.mark.parametrize("late", [0.9, 1.1])
def test_an_outrun_emulation_is_called_invalid(clock: Clock, late: float) -> None:
    """A little late is forgiven, more than that is not."""
    model = Working(8, clock)
    backend = attached(model, 8)
    backend.start_pacing(1e6)
    work = backend.modelled_work([SAMPLES], 32)
    forward, backward = work.forward[0] * 1e6, work.backward[0] * 1e6  # about 20 and 10 seconds
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    assert backend.invalid_reason() is None
    allowed = 2 * (forward + backward)
    model.forward_seconds = forward + late * emulated.OUTRUN_TOLERANCE * allowed
    model(torch.zeros(SAMPLES, 8)).sum().backward()
    reason = backend.invalid_reason()
    if late < 1:
        assert reason is None
        return
    assert reason is not None
    assert reason.startswith("emulated:0 (RTX 3090 (emulated)): ")
    assert "2% longer" in reason
    assert "raise `hardware.time_scale` above 1e+06" in reason


# ---------------------------------------------------------------- the device itself


def test_what_an_emulated_device_says_of_itself() -> None:
    spec = EmulatedBackend.describe_card(2, card("arc_a770"))
    backend = EmulatedBackend(spec)
    assert EmulatedBackend.cards(Machine(), []) == []
    assert (spec.id, spec.vendor, spec.emulated) == ("emulated:2", "intel", True)
    assert spec.name == "Arc A770 (emulated)"
    assert spec.memory_bytes == 16 * GIB
    assert backend.peak_memory_bytes() is None
    assert backend.invalid_reason() is None
    assert backend.backward_done() == 1.0
    assert backend.paced() == []
    assert backend.torch_device() == torch.device("cpu")
    assert EmulatedBackend.environment(spec) == {"CUDA_VISIBLE_DEVICES": ""}
    backend.begin_step(0)  # nothing is attached yet, and nothing fails
    backend.begin_update()
    backend.resume()


def test_facts_that_travel_with_the_device_count() -> None:
    """A person's own catalogue need not be there where the rank runs."""
    facts = CARD.model_dump(mode="json") | {"efficiency": 0.9, "key": "mine"}
    backend = attached(mlp(8, 512, 512, 4), 8, card="mine", card_facts=facts)
    _, backward = flops(8, 512, 512, 4)
    expected = OVERHEAD + 64 * backward / (35.58e12 * 0.9)
    assert backend.modelled_work([64], 32).backward == pytest.approx([expected])


def test_the_modelled_memory_is_the_cards(clock: Clock) -> None:
    model = mlp(8, 16, 4)
    backend = attached(model, 8, memory_bytes=CONTEXT_BYTES + 4096)
    model(torch.zeros(1, 8))
    peak = backend.peak_memory_bytes()
    assert peak is not None and CONTEXT_BYTES < peak <= CONTEXT_BYTES + 4096
    with pytest.raises(torch.OutOfMemoryError, match=r"emulated:0 \(RTX 3090 \(emulated\)\)"):
        model(torch.zeros(64, 8))


def test_pieces_pay_for_what_passes_between_them(clock: Clock) -> None:
    """A middle piece: its inputs come over the link, its outputs leave over it, and gradients go back."""
    first, last = mlp(64, 64), mlp(64, 64)
    model = nn.Sequential(first, last)
    backend = EmulatedBackend(EmulatedBackend.describe_card(0, card("rtx_3090")))
    backend.precision = "float32"
    inputs = torch.zeros(2, 64)
    sizes = 4 * 64
    stages = [
        StagePasses(first, inputs, takes_bytes=0, gives_bytes=sizes),
        StagePasses(last, inputs.clone().requires_grad_(), takes_bytes=sizes, gives_bytes=sizes),
    ]
    backend.attach_stages(stages, model, torch.optim.SGD(model.parameters()))
    begin, middle = backend.times
    one_way = card("rtx_3090").host_link.seconds(10 * sizes)
    own = CardTimes(card("rtx_3090"), "float32", 2 * 64 * 64, 2 * 64 * 64, 0.0)
    both = CardTimes(card("rtx_3090"), "float32", 2 * 64 * 64, 4 * 64 * 64, 0.0)
    assert begin.forward(10, 0) == pytest.approx(own.forward(10, 0) + one_way)
    assert middle.forward(10, 10 * sizes) == pytest.approx(own.forward(10, 10 * sizes) + one_way)
    assert begin.backward(10) == pytest.approx(own.backward(10) + one_way)
    assert middle.backward(10) == pytest.approx(both.backward(10) + 2 * one_way)
    assert begin.update() == middle.update()
    assert begin.update() > own.update()

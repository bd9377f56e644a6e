"""Faults at a device: a stall stalls, a death kills, an out-of-memory is what torch raises."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_clock import Clock
from torch import nn

from hetexp.core.config import FaultEvent
from hetexp.core.fault import FaultSchedule
from hetexp.hardware.backend import backend_class
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.emulation import ordered_faults, pacing
from hetexp.hardware.emulation.ordered_faults import FaultyBackend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(ordered_faults, "time", fake)
    monkeypatch.setattr("hetexp.hardware.backends.cpu.time", fake)  # which marks are read from
    monkeypatch.setattr(pacing, "time", fake)
    return fake


def device(*events: dict[str, Any], slow: float = 1.0) -> FaultyBackend:
    spec = replace(CpuBackend.describe(0), slow=slow)
    backend = backend_class("cpu")(spec)
    typed = [FaultEvent.model_validate({"device": spec.id, **event}) for event in events]
    backend.faults = FaultSchedule(typed, spec.id)
    return backend


def test_a_stall_is_silent_for_its_seconds(clock: Clock) -> None:
    backend = device({"kind": "stall", "at_step": 2, "seconds": 7.5})
    for step in range(5):
        backend.begin_step(step)
    assert clock.slept == [7.5]


def test_seconds_count_from_the_first_step(clock: Clock) -> None:
    backend = device({"kind": "stall", "at_seconds": 10.0, "seconds": 2.0})
    clock.work(60.0)  # loading data, forming the group
    backend.begin_step(0)
    clock.work(9.9)
    backend.begin_step(1)
    assert clock.slept == []
    clock.work(0.2)
    backend.begin_step(2)
    assert clock.slept == [2.0]


def test_out_of_memory_is_torchs_own_error_and_names_the_device(clock: Clock) -> None:
    backend = device({"kind": "oom", "at_step": 1})
    backend.begin_step(0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        backend.begin_step(1)
    assert str(backend.spec) in str(caught.value)
    assert "`fault.events`" in str(caught.value)


def test_death_is_sudden() -> None:
    program = """
        from hetexp.core.config import FaultEvent
        from hetexp.core.fault import FaultSchedule
        from hetexp.hardware.backend import backend_class
        from hetexp.hardware.backends.cpu import CpuBackend

        backend = backend_class("cpu")(CpuBackend.describe(0))
        backend.faults = FaultSchedule([FaultEvent(kind="death", device="cpu:0", at_step=2)], "cpu:0")
        for step in range(4):
            backend.begin_step(step)
            print(step, flush=True)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == ["0", "1"]
    assert ended.stderr == ""


def test_a_rehearsal_is_free_of_faults(clock: Clock) -> None:
    kinds = ("slow", "thermal", "stall", "death", "oom")
    backend = device(*({"kind": kind, "at_step": 0, "seconds": 3.0} for kind in kinds if kind != "death"))
    for _ in range(6):
        backend.begin_step(-1)
    assert clock.slept == []
    assert backend.slower == 1.0
    clock.work(100.0)
    with pytest.raises(torch.OutOfMemoryError):  # its turn comes with the first real step
        backend.begin_step(0)
    assert clock.slept == [3.0]
    assert backend.slower == 2.0


def test_a_rehearsal_does_not_start_the_clock(clock: Clock) -> None:
    backend = device({"kind": "stall", "at_seconds": 10.0})
    backend.begin_step(-1)
    clock.work(60.0)
    backend.begin_step(0)
    assert clock.slept == []


def test_a_slow_down_multiplies_what_the_device_is_slowed_by_anyway(clock: Clock) -> None:
    backend = device({"kind": "slow", "at_step": 1, "until_step": 2, "factor": 3.0}, slow=2.0)
    found = []
    for step in (-1, 0, 1, 2):
        backend.begin_step(step)
        found.append(backend.slower)
    assert found == [2.0, 2.0, 6.0, 2.0]


class Timed(nn.Module):
    """Works a second forward on the fake clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear, self.clock = nn.Linear(2, 2), clock

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.clock.work(1.0)
        output: torch.Tensor = self.linear(value)
        return output


def test_a_real_device_is_slowed_from_the_step_on(clock: Clock) -> None:
    backend = device({"kind": "slow", "at_step": 1, "factor": 4.0})
    model = Timed(clock)
    backend.attach(model, torch.optim.SGD(model.parameters()), torch.zeros(1, 2))
    took = []
    for step in (0, 1):
        backend.begin_step(step)
        start = clock.now
        model(torch.zeros(1, 2)).sum().backward()
        took.append(clock.now - start)
    assert took == pytest.approx([1.0, 4.0])


def test_a_device_that_nothing_slows_has_no_hooks() -> None:
    backend = device({"kind": "stall", "at_step": 1})
    model = nn.Linear(2, 2)
    backend.attach(model, torch.optim.SGD(model.parameters()), torch.zeros(1, 2))
    assert not model._forward_hooks and not model._forward_pre_hooks

"""How a run handles device failures (config group `fault`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hetexp.core.config.hardware import either
from hetexp.core.errors import must_be
from hetexp.core.section import Section

Kind = Literal[
    "slow",
    "thermal",
    "jitter",
    "stall",
    "death",
    "segfault",
    "freeze",
    "hang",
    "comms",
    "device_error",
    "oom",
]


class FaultEvent(Section):
    """One fault to inject into one device."""

    kind: Kind
    """What happens to the device's process. The table of [faults](../explanation/emulation.md#faults)
    describes each kind."""
    device: str
    """Id of the device in the plan: `emulated:0`, `cuda:1`."""
    at_step: NonNegativeInt | None = None
    """Step at which the fault begins, instead of `at_seconds`."""
    at_seconds: NonNegativeFloat | None = None
    """Seconds from the first step to the fault, instead of `at_step`."""
    until_step: PositiveInt | None = None
    """First step after a slowdown; `null`: it never ends."""
    factor: Annotated[float, Field(ge=1)] = 2.0
    """Factor of a slowdown; for `jitter` the largest."""
    warm_up: PositiveFloat = 20.0
    """Steps (or seconds) after which a thermal slowdown has reached two thirds."""
    seconds: PositiveFloat = 5.0
    """Length of a stall, in seconds."""


class FaultConfig(Section):
    """How to handle device failures; the group's option injects faults for testing."""

    events: list[FaultEvent] = []
    """Faults to inject; empty in a real training."""
    survive: bool = True
    """Whether a run goes on without a lost device; `false`: the run ends."""
    min_devices: PositiveInt = 1
    """Fewest devices to go on with."""
    heartbeat_seconds: PositiveFloat = 1.0
    """Longest silence of a rank that uses no CPU, before it counts as lost."""
    respawn: NonNegativeInt = 2
    """Number of times that a lost device is restarted."""
    respawn_seconds: PositiveFloat = 1.0
    """Pause before a restart; it doubles each time that the device does not come to train."""
    spare: bool | None = None
    """Whether two processes that have imported everything wait for the next lost devices; `null`: if a rank
    drives a card. Each takes some 0.5 GiB of host memory, and starts only if 4 GiB are free."""
    stop_seconds: PositiveFloat = 30.0
    """Longest time for the last checkpoint, once a stop is requested."""


def fault_problems(fault: FaultConfig) -> list[str]:
    """Return the clashes between the keys of events whose values are each right."""
    problems = []
    for position, event in enumerate(fault.events):
        key = f"fault.events[{position}]"
        problems += either(key, "at_step", event.at_step, "at_seconds", event.at_seconds)
        first = event.at_step or 0
        if event.until_step is not None and event.until_step <= first:
            problems.append(must_be(f"{key}.until_step", f"after step {first}", event.until_step))
    return problems

"""Ordered faults: which, when, how much; and what a person reads of a wrong order."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from hetexp.app import compose_config
from hetexp.core.config import FaultEvent, check_config
from hetexp.core.fault import Due, FaultSchedule

HERE = "emulated:0"


def event(kind: str, device: str = HERE, **values: Any) -> FaultEvent:
    return FaultEvent.model_validate({"kind": kind, "device": device, **values})


def factors(schedule: FaultSchedule, *steps: int) -> list[float]:
    return [schedule.factor(step, 0.0) for step in steps]


# ---------------------------------------------------------------- slower


def test_without_events_nothing_happens() -> None:
    schedule = FaultSchedule([], HERE)
    assert factors(schedule, 0, 1000) == [1.0, 1.0]
    assert schedule.due(1000, 1e6) == []


def test_slow_from_a_step_to_a_step() -> None:
    schedule = FaultSchedule([event("slow", at_step=3, until_step=5, factor=4.0)], HERE)
    assert factors(schedule, 0, 2, 3, 4, 5, 6) == [1.0, 1.0, 4.0, 4.0, 1.0, 1.0]


def test_slow_for_good() -> None:
    assert factors(FaultSchedule([event("slow", at_step=0, factor=2.5)], HERE), 0, 10**6) == [2.5, 2.5]


def test_slow_from_a_second() -> None:
    schedule = FaultSchedule([event("slow", at_seconds=2.0, until_step=7, factor=3.0)], HERE)
    moments = [(0, 1.9), (5, 2.0), (6, 60.0), (7, 61.0)]
    assert [schedule.factor(step, seconds) for step, seconds in moments] == [1.0, 3.0, 3.0, 1.0]


def test_slow_downs_multiply() -> None:
    both = [event("slow", at_step=1, factor=2.0), event("slow", at_step=2, factor=3.0)]
    assert factors(FaultSchedule(both, HERE), 0, 1, 2) == [1.0, 2.0, 6.0]


def test_heat_rises_towards_the_factor() -> None:
    schedule = FaultSchedule([event("thermal", at_step=10, factor=3.0, warm_up=20.0)], HERE)
    curve = factors(schedule, *range(10, 300))
    assert factors(schedule, 0, 9, 10) == [1.0, 1.0, 1.0]
    assert curve == sorted(curve) and len(set(curve[:100])) == 100
    assert curve[20] == pytest.approx(1 + 2 * (1 - math.exp(-1)))  # about two thirds of the way
    assert max(curve) <= 3.0
    assert curve[-1] == pytest.approx(3.0, abs=1e-5)


def test_heat_counts_seconds_where_it_begins_at_a_second() -> None:
    schedule = FaultSchedule([event("thermal", at_seconds=5.0, factor=2.0, warm_up=10.0)], HERE)
    assert schedule.factor(10**6, 4.9) == 1.0
    assert schedule.factor(0, 15.0) == pytest.approx(2 - math.exp(-1))


def test_heat_ends_with_its_last_step() -> None:
    schedule = FaultSchedule([event("thermal", at_step=0, factor=2.0, until_step=4)], HERE)
    assert factors(schedule, 3)[0] > 1.0
    assert factors(schedule, 4) == [1.0]


# ---------------------------------------------------------------- sudden


SUDDEN = ("stall", "death", "segfault", "freeze", "hang", "comms", "device_error", "oom")


@pytest.mark.parametrize("kind", SUDDEN)
def test_a_sudden_event_happens_once(kind: str) -> None:
    schedule = FaultSchedule([event(kind, at_step=3, seconds=1.5)], HERE)
    assert [schedule.due(step, 0.0) for step in (0, 2)] == [[], []]
    assert schedule.due(3, 0.0) == [Due(kind, 1.5)]
    assert [schedule.due(step, 0.0) for step in (3, 4, 100)] == [[], [], []]
    assert schedule.factor(5, 0.0) == 1.0


def test_a_sudden_event_at_a_second() -> None:
    schedule = FaultSchedule([event("stall", at_seconds=2.0)], HERE)
    assert schedule.due(50, 1.99) == []
    assert schedule.due(51, 2.4) == [Due("stall", 5.0)]
    assert schedule.due(52, 3.0) == []


def test_events_that_are_due_together_keep_their_order() -> None:
    events = [event("stall", at_step=2, seconds=1.0), event("oom", at_step=2), event("stall", at_step=4)]
    schedule = FaultSchedule(events, HERE)
    assert [due.kind for due in schedule.due(2, 0.0)] == ["stall", "oom"]
    assert [due.kind for due in schedule.due(4, 0.0)] == ["stall"]


def test_the_same_event_twice_happens_twice() -> None:
    schedule = FaultSchedule([event("stall", at_step=2)] * 2, HERE)
    assert len(schedule.due(2, 0.0)) == 2


def test_what_ended_a_process_does_not_happen_to_the_next_one() -> None:
    """Both ask the launcher's store, which outlives them."""
    events = [
        event("death", "emulated:1", at_step=3),
        event("death", at_step=3),
        event("oom", at_seconds=1.0),
    ]
    asked: list[int] = []

    def first(position: int) -> bool:
        asked.append(position)
        return asked.count(position) == 1

    before, after = (FaultSchedule(events, HERE, first) for _ in range(2))
    assert before.due(3, 0.0) == [Due("death", 5.0)]
    assert after.due(3, 2.0) == [Due("oom", 5.0)]
    assert before.due(4, 2.0) == []
    assert asked == [1, 1, 2, 2]


def test_slow_downs_are_not_sudden() -> None:
    schedule = FaultSchedule([event("slow", at_step=0), event("thermal", at_step=0)], HERE)
    assert schedule.due(5, 5.0) == []
    assert len(schedule.lasting) == 2


def test_events_of_other_devices_are_left_out() -> None:
    others = [event(kind, "emulated:1", at_step=0) for kind in ("slow", "thermal", *SUDDEN)]
    schedule = FaultSchedule(others, HERE)
    assert schedule.factor(10, 10.0) == 1.0
    assert schedule.due(10, 10.0) == []
    assert schedule.lasting == []


# ---------------------------------------------------------------- what a person reads


def problems(written: str) -> list[str]:
    cfg = compose_config(["hardware=cpu", f"fault.events=[{written}]"])
    return check_config(json.loads(json.dumps(OmegaConf.to_container(cfg, resolve=True))))[1]


@pytest.mark.parametrize(
    "moment", ["at_step: 3", "at_seconds: 2.5", "at_seconds: 2", "at_step: 3, at_seconds: null"]
)
def test_one_moment_is_right(moment: str) -> None:
    assert problems(f"{{kind: stall, device: 'cpu:0', {moment}}}") == []


@pytest.mark.parametrize(
    ("moment", "which"),
    [
        ("", "neither"),
        (", at_seconds: null", "neither"),
        (", at_step: null", "neither"),
        (", at_step: null, at_seconds: null", "neither"),
        (", at_step: 3, at_seconds: 2.0", "both"),
    ],
)
def test_an_event_needs_exactly_one_moment(moment: str, which: str) -> None:
    (problem,) = problems(f"{{kind: stall, device: 'cpu:0'{moment}}}")
    assert problem.startswith("`fault.events[0]")
    assert " must " in problem and " but " in problem and problem.rstrip(".").endswith("instead")
    assert "`at_step`" in problem and "at_seconds" in problem
    assert which in problem


@pytest.mark.parametrize(
    ("written", "start"),
    [
        ("{kind: slow, at_step: 1}", "`fault.events[0].device` must be given"),
        ("{device: 'cpu:0', at_step: 1}", "`fault.events[0].kind` must be given"),
        ("{kind: fire, device: 'cpu:0', at_step: 1}", "`fault.events[0].kind` must be 'slow', 'thermal'"),
        ("{kind: slow, device: 'cpu:0', at_step: -1}", "`fault.events[0].at_step` must be greater than"),
        ("{kind: slow, device: 'cpu:0', at_step: 1, factor: 0}", "`fault.events[0].factor` must be greater"),
        ("{kind: slow, device: 'cpu:0', at_step: 1, speed: 2}", "`fault.events[0].speed` is not a key of"),
    ],
)
def test_a_wrong_value_is_told_by_its_key(written: str, start: str) -> None:
    (problem,) = problems(written)
    assert problem.startswith(start)


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        event("slow", at_step=1).factor = 9.0


def test_jitter_stays_within_its_factor_and_repeats() -> None:
    event = FaultEvent(kind="jitter", device="emulated:0", at_step=2, factor=1.5)
    factors = [FaultSchedule([event], "emulated:0").factor(step, 0.0) for step in range(40)]
    assert factors[:2] == [1.0, 1.0]
    assert all(1.0 <= factor <= 1.5 for factor in factors)
    assert max(factors) - min(factors[2:]) > 0.2
    again = FaultSchedule([event], "emulated:0")
    assert [again.factor(step, 0.0) for step in range(40)] == factors


def test_a_fault_before_the_first_step_happened_before_the_resume() -> None:
    events = [event("stall", at_step=3, seconds=1.0), event("stall", at_step=6, seconds=2.0)]
    schedule = FaultSchedule(events, HERE)
    assert schedule.due(5, 0.0) == []
    assert schedule.due(6, 0.0) == [Due("stall", 2.0)]


@pytest.mark.parametrize(("until", "wrong"), [(3, True), (4, True), (5, False)])
def test_a_slow_down_ends_after_it_has_begun(until: int, wrong: bool) -> None:
    raw = OmegaConf.to_container(compose_config([]), resolve=True)
    assert isinstance(raw, dict)
    raw["fault"]["events"] = [{"kind": "slow", "device": HERE, "at_step": 4, "until_step": until}]
    problems = check_config(json.loads(json.dumps(raw)))[1]
    assert bool(problems) == wrong
    assert all("`fault.events[0].until_step` must be after step 4" in problem for problem in problems)

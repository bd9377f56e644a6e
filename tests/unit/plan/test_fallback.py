"""A strategy that cannot run says why; only `strategy.fallback=single` goes on, on the fastest device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import checked

from hetexp.core.config import check_config
from hetexp.core.device import DeviceSpec
from hetexp.core.summary import blank_summary
from hetexp.plan.fallback import fastest
from hetexp.plan.planner import make_plan
from hetexp.plan.run_spec import CheckedRun

TINY = ("model=mlp", "data=synthetic", "hardware.check_memory=false")
CHOOSY = "strategy._target_=choosy.Choosy"
UNEQUAL = (
    "hardware.devices=[cpu,emulated:t4,emulated:rtx_3090]",
    "balancing=manual",
    "balancing.weights=[1,2,3]",
)
REFUSED = "`strategy` must be ddp for cpu:0, but is 'choosy' instead."


def found(*overrides: str, **request: Any) -> CheckedRun:
    return checked(*TINY, *overrides, **request)


def test_without_it_the_reason_and_the_way_out_are_told() -> None:
    problems = found(CHOOSY, *UNEQUAL).problems
    assert problems == [
        f"{REFUSED} Or strategy.fallback=single goes on with the fastest of the devices alone."
    ]
    problems = found("strategy=single", "hardware.devices=[cpu,cpu]").problems
    assert "fallback" not in problems[0]  # choosing one device is what it says already
    problems = found("strategy.static_graph=true", "trainer.accumulate=2").problems
    assert problems and "fallback" not in problems[0]  # one's own option is wrong


def test_with_it_the_fastest_device_trains_alone() -> None:
    choices = {"strategy": "choosy", "hardware": "auto"}
    spec = found(CHOOSY, *UNEQUAL, "strategy.fallback=single", choices=choices).accepted()
    assert [str(device) for device in spec.selection.devices] == ["emulated:1 (RTX 3090 (emulated))"]
    plan = make_plan(spec)
    assert (plan.strategy, plan.local_batch_sizes, plan.choices["strategy"]) == ("single", (64,), "single")
    assert plan.fallback == {"from": "choosy", "to": "single", "reason": REFUSED}
    (told,) = [reason for reason in plan.reasons if "strategy.fallback" in reason]
    assert REFUSED in told and "emulated:1 (RTX 3090 (emulated)) trains alone" in told
    assert blank_summary(plan, "completed")["fallback"] == plan.fallback
    again, wrong = check_config(plan.config)  # as a rank reads it
    assert not wrong and again is not None
    assert again.strategy == {"_target_": "hetexp.strategy.single.Single"}
    assert again.fallback == "single"


def test_who_can_run_does_not_fall_back() -> None:
    for overrides in (
        (CHOOSY, "hardware.devices=[emulated:t4,emulated:rtx_3090]"),
        ("strategy=ddp", "hardware.devices=[cpu,cpu]"),
    ):
        plan = make_plan(found(*overrides, "strategy.fallback=single").accepted())
        assert plan.fallback is None
        assert len(plan.devices) == 2
        assert not any("fallback" in reason for reason in plan.reasons)


def test_single_itself_may_choose_among_several() -> None:
    spec = found(
        "strategy=single", "hardware.devices=[emulated:t4,emulated:rtx_3090]", "strategy.fallback=single"
    ).accepted()
    assert [device.name for device in spec.selection.devices] == ["RTX 3090 (emulated)"]
    plan = make_plan(spec)
    assert plan.fallback is None  # nothing else was asked for
    (told,) = [reason for reason in plan.reasons if "strategy.fallback" in reason]
    assert "of 2 devices emulated:1 (RTX 3090 (emulated)) trains alone, the fastest by" in told


def test_other_words_are_refused_by_key() -> None:
    problems = found("strategy.fallback=ddp", "trainer.clip_norm=-1").problems
    assert problems[0] == "`strategy.fallback` must be single or null, but is 'ddp' instead."
    assert len(problems) == 2


def test_the_fastest() -> None:
    def device(name: str, vendor: str = "nvidia", rate: float | None = None) -> DeviceSpec:
        rates = {"float32": rate} if rate is not None else None
        return DeviceSpec(name, "cuda", 0, name, vendor, rates=rates)

    def chosen(*devices: DeviceSpec) -> tuple[str, str]:
        best, how = fastest(devices, ["float32"] * len(devices))
        return best.id, how

    assert chosen(device("a", rate=10.0), device("b", rate=20.0)) == (
        "b",
        "the fastest by the catalogue's rates",
    )
    assert chosen(device("a", rate=10.0), replace(device("b", rate=20.0), slow=3.0))[0] == "a"
    first, how = chosen(device("cpu", vendor="cpu", rate=90.0), device("a"), device("b"))
    assert (first, "cards before the CPU" in how) == ("a", True)
    assert chosen(device("a")) == ("a", "the only device")


@pytest.mark.parametrize("words", [(), ("strategy=single", "hardware=cpu")])
def test_null_is_the_default(words: tuple[str, ...]) -> None:
    spec = found(*words).accepted()
    assert spec.raw["strategy"]["fallback"] is None
    assert spec.config.fallback is None and "fallback" not in spec.config.strategy

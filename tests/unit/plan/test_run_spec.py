"""A run builds its strategy and policy once, and never keeps one of another section."""

from __future__ import annotations

import pytest
from support import spec_on, unbuilt_config

from hetexp.core.errors import ConfigError
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.plan.run_spec import CheckedRun, RunSpec

CPUS = [CpuBackend.describe(index) for index in range(2)]
SINGLE = {"_target_": "hetexp.strategy.single.Single"}


def spec(**strategy: object) -> RunSpec:
    node = {"_target_": "hetexp.strategy.ddp.DDP", **strategy}
    return spec_on(CPUS, unbuilt_config(strategy=node))


def test_strategy_and_policy_are_built_once_and_passed_on() -> None:
    first = spec()
    strategy, policy = first.strategy, first.policy
    assert first.strategy is strategy
    later = first.with_values(resume="somewhere").replaced(selection=first.selection)
    assert later.strategy is strategy and later.policy is policy
    assert later.config.resume == later.raw["resume"] == "somewhere"
    assert "resume" not in first.raw


def test_another_section_gives_another_strategy() -> None:
    first = spec(bucket_cap_mb=3.0)
    policy = first.policy
    assert first.strategy.name == "ddp"
    other = first.with_values(strategy=SINGLE)
    assert other.strategy.name == "single" and other.policy is policy
    assert other.raw["strategy"] == SINGLE
    assert first.strategy.name == "ddp"
    again = other.with_values(strategy={**SINGLE, "_target_": "hetexp.strategy.ddp.DDP"})
    assert again.strategy is not first.strategy


def test_the_wish_to_fall_back_stays_with_another_strategy() -> None:
    other = spec(fallback="single").with_values(strategy=SINGLE)
    assert other.raw["strategy"] == {**SINGLE, "fallback": "single"}
    assert other.config.strategy == SINGLE and other.config.fallback == "single"


def test_only_a_run_without_problems_is_accepted() -> None:
    run = spec()
    assert CheckedRun(run, []).accepted() is run
    with pytest.raises(ConfigError) as caught:
        CheckedRun(run, ["one", "two", "one"]).accepted()
    assert caught.value.problems == ["one", "two"]
    with pytest.raises(ConfigError):
        CheckedRun(None, ["one"]).accepted()

"""Rows of strategies and policies: the numbers of a measured plan, brute force, and what is not known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plan_on

from hetexp.balancing.adaptive import Adaptive
from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.equal import Equal
from hetexp.balancing.manual import Manual
from hetexp.balancing.profiled import Profiled
from hetexp.balancing.tflops import Tflops
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.plan import Plan
from hetexp.plan.calibrated_plan import best_split, choose
from hetexp.plan.device_estimates import CATALOGUE, NOTHING, DeviceEstimates
from hetexp.plan.predict.inputs import LEAST_ENERGY, PredictedRun, PredictionInputs
from hetexp.plan.predict.runs import Prediction, predict_runs
from hetexp.plan.strategy import Strategy
from hetexp.strategy.ddp import DDP
from hetexp.strategy.single import Single

STRATEGIES: dict[str, Strategy] = {"ddp": DDP(), "single": Single()}
POLICIES: dict[str, BalancingPolicy] = {"equal": Equal(), "profiled": Profiled(), "tflops": Tflops()}


def plan_of(count: int, total: int = 64, watts: Sequence[float | None] | None = None) -> Plan:
    limits = watts or [100.0] * count
    devices = [
        DeviceSpec(
            f"cuda:{i}", "cuda", i, f"Card {i}", "nvidia", power_limit_watts=limits[i], memory_bytes=8 * GIB
        )
        for i in range(count)
    ]
    return plan_on(devices, {"trainer": {"global_batch_size": total}})


def device(per_sample: float, fixed: float = 0.0) -> DeviceCalibration:
    return DeviceCalibration(SpeedCurve(fixed, per_sample), 0.5, 0.0, 0.0)


def linked(seconds: float) -> Exchange:
    """An exchange of two that takes so long."""
    return Exchange(((1.0, 0),), Channel(seconds / 2))


def ask(plan: Plan, devices: Sequence[DeviceCalibration], exchange: Exchange, **others: Any) -> Prediction:
    known = DeviceEstimates.measured(plan.devices, devices, exchange)
    return predict_runs(PredictionInputs(plan, known, POLICIES, **others), STRATEGIES)


def row(found: Prediction, policy: str | None, strategy: str = "ddp") -> PredictedRun:
    (one,) = [one for one in found.rows if (one.strategy, one.policy) == (strategy, policy)]
    return one


# ---------------------------------------------------------------- numbers


def test_two_devices_by_hand() -> None:
    found = ask(plan_of(2), [device(0.01), device(0.03)], linked(0.02))
    equal, best, alone = row(found, "equal"), row(found, "profiled"), row(found, None, "single")
    assert (equal.counts, best.counts, alone.counts) == ((32, 32), (48, 16), (64,))
    assert equal.step_seconds == pytest.approx(0.98)
    assert best.step_seconds == pytest.approx(0.5)
    assert best.samples_per_second == pytest.approx(128)
    assert found.solo_samples_per_second == pytest.approx((100.0, 100 / 3))
    assert best.efficiency == pytest.approx(0.96)
    assert equal.ceiling == best.ceiling == pytest.approx(0.96)
    assert alone.step_seconds == pytest.approx(0.64)
    assert alone.efficiency == alone.ceiling == pytest.approx(0.75)
    # 100 W for 0.48 s on each device.
    assert best.joules_per_sample == pytest.approx(2 * 48 / 64)
    assert best.watts == 200
    assert row(found, "tflops").problem is not None  # no such cards in the catalogue
    assert found.best is best
    assert "1.28× as fast as the fastest device alone, 1.96× as fast as an equal split" in found.reasons[0]


CARDS = st.lists(st.builds(device, st.floats(1e-3, 1.0), st.floats(0.0, 0.5)), min_size=2, max_size=4)


@given(CARDS, st.floats(0.0, 1.0), st.integers(1, 200))
def test_the_numbers_are_those_of_a_measured_plan(
    devices: list[DeviceCalibration], seconds: float, total: int
) -> None:
    plan, exchange = plan_of(len(devices), total), linked(seconds)
    found = ask(plan, devices, exchange)
    choice = choose(plan, devices, exchange)
    best = row(found, "profiled")
    assert (best.ranks, best.counts) == (choice.ranks, choice.split.counts)
    assert best.step_seconds == choice.step_seconds
    assert best.step_seconds == best_split(plan, devices, exchange, best.ranks).step_seconds
    fastest = min(range(len(devices)), key=lambda rank: devices[rank].curve.seconds(total))
    alone = row(found, None, "single")
    assert alone.step_seconds == best_split(plan, devices, exchange, (fastest,)).step_seconds
    assert found.best is not None
    assert (found.best.step_seconds or 0) <= (alone.step_seconds or 0) * 1.011
    left_out = set(range(len(devices))) - set(best.ranks)
    assert len(best.reasons) == len(left_out)
    for rank in left_out:
        assert any(str(plan.devices[rank]) in reason for reason in best.reasons)


@settings(max_examples=40, deadline=None)
@given(CARDS, st.integers(1, 12))
def test_without_exchange_nothing_beats_the_best_row(devices: list[DeviceCalibration], total: int) -> None:
    """Against every split over every set of the devices."""
    best = row(ask(plan_of(len(devices), total), devices, Exchange()), "profiled").step_seconds
    splits = itertools.product(range(total + 1), repeat=len(devices))
    times = [
        max(one.curve.seconds(n) for one, n in zip(devices, split, strict=True))
        for split in splits
        if sum(split) == total
    ]
    assert best is not None
    assert best <= min(times) / (1 - 0.011)


def test_a_device_that_slows_the_job_is_left_out_with_the_sentence() -> None:
    found = ask(plan_of(2), [device(0.2), device(0.01)], linked(0.1))
    assert row(found, "profiled").ranks == (1,)
    assert found.best is not None
    assert found.best.ranks == (1,)
    assert any(
        reason.startswith("cuda:0 (Card 0) is left out: with it a step is predicted to take")
        for reason in found.reasons
    )


def test_a_policy_that_follows_without_measuring_first_leaves_nobody_out() -> None:
    plan, devices = plan_of(2), [device(0.2), device(0.01)]
    known = DeviceEstimates.measured(plan.devices, devices, linked(0.1))
    policies = {"adaptive": Adaptive(), "auto": Adaptive(calibrate=True)}
    found = predict_runs(PredictionInputs(plan, known, policies), {"ddp": DDP()})
    assert row(found, "adaptive").ranks == (0, 1)
    assert row(found, "adaptive").step_seconds == best_split(plan, devices, linked(0.1), (0, 1)).step_seconds
    assert row(found, "auto").ranks == (1,)
    assert found.best is row(found, "auto")


def test_of_equals_the_preferred_one() -> None:
    plan, devices = plan_of(2), [device(0.01), device(0.01)]
    known = replace(
        DeviceEstimates.measured(plan.devices, devices, Exchange()), sources=(CATALOGUE, CATALOGUE)
    )
    policies = {"a": Profiled(), "b": Adaptive(calibrate=True), "c": Profiled()}
    for preferred in policies:
        best = predict_runs(PredictionInputs(plan, known, policies), {"ddp": DDP()}, preferred).best
        assert best is not None
        assert best.policy == preferred


def test_one_device_has_nothing_to_share() -> None:
    found = ask(plan_of(1), [device(0.01)], Exchange())
    assert [(one.strategy, one.policy, one.counts) for one in found.rows] == [
        ("ddp", None, (64,)),
        ("single", None, (64,)),
    ]


# ---------------------------------------------------------------- what is recommended


def test_of_equals_the_simplest_if_measured_and_else_one_that_measures() -> None:
    plan, devices = plan_of(2), (device(0.01), device(0.01))
    known = DeviceEstimates.measured(plan.devices, devices, Exchange())
    best = predict_runs(PredictionInputs(plan, known, POLICIES), STRATEGIES).best
    assert best is not None
    assert best.policy == "equal"
    promised = replace(known, sources=(CATALOGUE, CATALOGUE))
    best = predict_runs(PredictionInputs(plan, promised, POLICIES), STRATEGIES).best
    assert best is not None
    assert best.policy == "profiled"


def test_what_does_not_fit_is_not_recommended() -> None:
    def needs(ranks: Sequence[int], counts: Sequence[int]) -> list[int | None]:
        return [count * GIB // 4 for count in counts]

    found = ask(plan_of(2), [device(0.01).capped(32), device(0.03).capped(32)], Exchange(), needs=needs)
    assert row(found, "profiled").memory_bytes == (8 * GIB, 8 * GIB)
    assert row(found, None, "single").problem == "no device alone holds 64 samples"
    weights = {"manual": Manual([3, 1])}
    known = DeviceEstimates.measured(plan_of(2).devices, [device(0.01), device(0.03)], Exchange())
    (manual,) = predict_runs(PredictionInputs(plan_of(2), known, weights, needs), {"ddp": DDP()}).rows
    assert manual.problem == "does not fit: cuda:0 (Card 0) needs 12.0 of 8.0 GiB"
    assert not manual.predicted


def test_devices_too_small_together() -> None:
    found = ask(plan_of(2), [device(0.01).capped(20), device(0.03).capped(20)], Exchange())
    assert found.best is None
    assert "find no place" in (row(found, "profiled").problem or "")
    assert found.reasons[0].startswith("No recommendation: ")


def test_a_strategy_that_the_cost_model_does_not_know() -> None:
    other: Strategy = type("Other", (DDP,), {"predict": Strategy.predict})()
    known = DeviceEstimates.measured(plan_of(2).devices, [device(0.01)] * 2, Exchange())
    found = predict_runs(PredictionInputs(plan_of(2), known, POLICIES), {"other": other})
    assert [one.problem for one in found.rows] == ["the cost model does not know this strategy"]
    assert found.best is None


def test_an_unknown_device_is_not_guessed() -> None:
    plan = plan_of(2)
    known = DeviceEstimates((device(0.01), None), (CATALOGUE, NOTHING), plan.devices, Exchange())
    found = predict_runs(PredictionInputs(plan, known, POLICIES), STRATEGIES)
    equal = row(found, "equal")
    assert equal.counts == (32, 32)
    assert (equal.step_seconds, equal.efficiency, equal.joules_per_sample) == (None, None, None)
    assert "cuda:1 (Card 1)" in (row(found, "profiled").problem or "")
    alone = row(found, None, "single")
    assert alone.ranks == (0,)
    assert alone.efficiency is None
    assert found.solo_samples_per_second[1] is None
    assert found.best is None
    assert "balancing=profiled measures" in found.reasons[0]


# ---------------------------------------------------------------- energy


def test_a_thrifty_device_gets_more() -> None:
    plan = plan_of(2, total=1000, watts=[400.0, 50.0])
    devices = [device(0.001), device(0.001)]
    found = ask(plan, devices, Exchange(), objective="energy")
    thrifty, fastest = row(found, LEAST_ENERGY), row(found, "profiled")
    assert found.best is thrifty
    assert thrifty.counts == (475, 525)  # the step may be 5 % longer
    assert (thrifty.joules_per_sample or 0) < (fastest.joules_per_sample or 0)
    assert any("balancing=manual balancing.weights=[475,525]" in reason for reason in found.reasons)


@given(CARDS, st.floats(0.0, 0.5), st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_least_energy_needs_no_more_than_any_row_hardly_slower(
    devices: list[DeviceCalibration], seconds: float, watts: list[int]
) -> None:
    plan = plan_of(len(devices), watts=[100.0 * one for one in watts][: len(devices)])
    found = ask(plan, devices, linked(seconds), objective="energy")
    fastest = min(one.step_seconds for one in found.rows if one.step_seconds is not None)
    assert found.best is not None
    assert found.best.step_seconds is not None
    assert found.best.step_seconds <= fastest * 1.05 * (1 + 1e-9)
    for one in found.rows:
        if one.predicted and (one.step_seconds or 0) <= fastest * 1.05:
            assert (found.best.joules_per_sample or 0) <= (one.joules_per_sample or 0)


@given(CARDS, st.floats(0.0, 0.5), st.integers(1, 20))
def test_a_budget_is_kept(devices: list[DeviceCalibration], seconds: float, hundreds: int) -> None:
    plan = plan_of(len(devices), watts=[100.0, 300.0, 200.0, 500.0][: len(devices)])
    budget = 100.0 * hundreds
    found = ask(plan, devices, linked(seconds), objective="budget", budget_watts=budget)
    assert found.best is not None  # the first device alone is within any of these
    assert (found.best.watts or 0) <= budget
    for rank, one in enumerate(plan.devices):
        if (one.power_limit_watts or 0) <= budget:
            assert (found.best.step_seconds or 0) <= devices[rank].curve.seconds(64) * 1.011


def test_no_energy_without_power_limits() -> None:
    plan = plan_of(2, watts=[100.0, None])
    found = ask(plan, [device(0.01)] * 2, Exchange(), objective="energy")
    assert row(found, "equal").joules_per_sample is None
    assert row(found, LEAST_ENERGY).problem == "the power limit of cuda:1 (Card 1) is not known"
    assert ask(plan, [device(0.01)] * 2, Exchange(), objective="budget", budget_watts=50.0).best is None

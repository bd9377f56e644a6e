"""Devices are measured once for a job; the split is chosen each time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from support import plan_on, spec_on, unbuilt_config

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.summary import blank_summary
from hetexp.launch.prepare.preparation import Preparation, with_microbatches
from hetexp.plan.run_spec import RunSpec

CARDS = tuple(DeviceSpec(f"cuda:{i}", "cuda", i, f"Card {i}", "nvidia", uuid=f"GPU-{i}") for i in range(2))


PROFILED, ADAPTIVE = "hetexp.balancing.profiled.Profiled", "hetexp.balancing.adaptive.Adaptive"


class Measuring:
    """Stands in for the ranks that measure: the second card is a third as fast and has a fixed cost."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, plan: Plan, spec: RunSpec) -> dict[str, Any]:
        total = spec.config.trainer.global_batch_size
        self.batches.append(total)
        curves = SpeedCurve(0.0, 0.001), SpeedCurve(0.0, 0.003, update_seconds=0.012)
        devices = [
            DeviceCalibration(c, 0.5, 0.01, 0.01, ((1, c.pass_seconds(1)), (total, c.pass_seconds(total))))
            for c in curves
        ]
        exchange = Exchange(((1.0, 0),), Channel(1e-4))
        return {"devices": [one.to_dict() for one in devices], "exchange": exchange.to_dict()}

    def plan(
        self, total: int = 64, model: str = "small", kind: str = PROFILED, dev: int = 0, **policy: Any
    ) -> Plan:
        raw = unbuilt_config(
            trainer={"global_batch_size": total, "seed": 0, "fast_dev_run": dev},
            model={"_target_": "unused", "name": model},
            balancing={"_target_": kind, **policy},
        )
        return Preparation(spec_on(CARDS, raw), self).split(plan_on(CARDS, raw), None)


@pytest.fixture
def measuring() -> Measuring:
    return Measuring()


def test_the_second_run_does_not_measure_and_says_when_the_first_did(measuring: Measuring) -> None:
    first, second = measuring.plan(), measuring.plan()
    assert measuring.batches == [64]
    assert second.local_batch_sizes == first.local_batch_sizes == (51, 13)
    assert not any("were measured at" in reason for reason in first.reasons)
    (told,) = [reason for reason in second.reasons if "were measured at" in reason]
    assert "balancing.recalibrate=true measures them again" in told
    kept = [blank_summary(plan, "completed")["calibration"] for plan in (first, second)]
    assert [one["cached"] for one in kept] == [False, True]
    assert kept[0]["measured_at"] == kept[1]["measured_at"]
    assert first.calibration is not None and second.calibration is not None
    assert first.calibration | {"cached": True} == second.calibration


def test_a_person_may_have_them_measured_anew(measuring: Measuring) -> None:
    measuring.plan()
    measuring.plan(recalibrate=True)
    assert measuring.batches == [64, 64]


def test_another_batch_or_model_is_another_choice(measuring: Measuring) -> None:
    """Never worse: with few samples the second card's fixed cost does not pay, whatever is known already."""
    assert len(measuring.plan(64).devices) == 2
    assert [device.id for device in measuring.plan(8).devices] == ["cuda:0"]
    assert len(measuring.plan(64).devices) == 2
    assert measuring.batches == [64, 8]
    measuring.plan(64, model="large")
    assert measuring.batches == [64, 8, 64]
    assert len(measuring.plan(64, drop_slower=False).devices) == 2
    assert measuring.batches == [64, 8, 64]


def test_a_policy_that_follows_begins_with_what_is_known(measuring: Measuring) -> None:
    unknown = measuring.plan(kind=ADAPTIVE)
    assert unknown.local_batch_sizes == (32, 32)
    assert unknown.calibration is None
    measured = measuring.plan()
    same = measuring.plan(kind=ADAPTIVE)  # the same job: with its prediction and its choice of devices
    assert same.local_batch_sizes == measured.local_batch_sizes
    assert same.calibration is not None and same.calibration["predicted_step_seconds"] is not None
    # Another batch: what each device does alone is known all the same.
    other = measuring.plan(128, kind=ADAPTIVE)
    assert other.local_batch_sizes == (99, 29)
    assert other.calibration is not None and other.calibration["predicted_step_seconds"] is None
    assert "measured in an earlier run; it begins with cuda:0 99, cuda:1 29 samples" in other.reasons[0]
    assert blank_summary(other, "completed")["calibration"] is None
    assert measuring.plan(64, model="large", kind=ADAPTIVE).calibration is None
    assert measuring.plan(128, kind=ADAPTIVE, recalibrate=True).calibration is None
    assert measuring.batches == [64]


def test_a_policy_that_follows_may_measure_first(measuring: Measuring) -> None:
    assert measuring.plan(kind=ADAPTIVE, calibrate=True).local_batch_sizes == (51, 13)
    assert measuring.batches == [64]


def test_nothing_is_measured_for_a_trial_of_a_few_batches(measuring: Measuring) -> None:
    assert measuring.plan(dev=2).calibration is None
    assert measuring.batches == []


class Memory:
    """Stands in for the estimates: the second card holds 8 samples of a pass, the third none at all."""

    def __init__(self, limits: list[int | None]) -> None:
        self.limits = limits

    def largest_passes(self, num_samples: list[int]) -> list[int | None]:
        return [
            limit if limit is not None and limit < samples else None
            for limit, samples in zip(self.limits, num_samples, strict=True)
        ]


def plain_plan(**others: Any) -> Plan:
    raw = unbuilt_config(trainer={"global_batch_size": 64})
    raw["trainer"]["microbatch_size"] = None
    plan = plan_on(CARDS, raw, precisions=())
    return replace(plan, **others)


def test_only_a_device_that_does_not_hold_its_samples_gets_several_passes() -> None:
    plan = with_microbatches(plain_plan(), cast(Any, Memory([None, 8])), (32, 32))
    assert plan.microbatch_sizes == (None, 8)
    (reason,) = plan.reasons
    assert reason == (
        "cuda:1 (Card 1) takes its 32 samples of a step in passes of at most 8: its memory does not hold "
        "more."
    )
    assert with_microbatches(plain_plan(), cast(Any, Memory([64, 32])), (32, 32)).microbatch_sizes == (
        None,
        None,
    )


def test_a_device_that_holds_no_sample_is_left_to_the_refusal() -> None:
    plan = with_microbatches(plain_plan(), cast(Any, Memory([None, 0])), (32, 32))
    assert plan.microbatch_sizes == (None, None)
    assert plan.reasons == ()


def test_the_smaller_of_estimate_and_measurement_holds() -> None:
    plan = with_microbatches(plain_plan(microbatch_sizes=(4, 16)), cast(Any, Memory([8, 8])), (32, 32))
    assert plan.microbatch_sizes == (4, 8)
    assert len(plan.reasons) == 2


def test_a_device_that_may_get_more_is_limited_before_it_does() -> None:
    memory = cast(Any, Memory([40, None]))
    assert with_microbatches(plain_plan(), memory, (32, 32)).microbatch_sizes == (None, None)
    plan = with_microbatches(plain_plan(), memory, (64, 64))
    assert plan.microbatch_sizes == (40, None)
    assert not any("in passes of at most" in reason for reason in plan.reasons)  # not yet

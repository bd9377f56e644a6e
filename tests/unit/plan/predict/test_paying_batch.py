"""The smallest batch with which all devices pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import plan_on

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.plan.calibrated_plan import choose
from hetexp.plan.predict.paying_batch import BatchPrediction, batch_predictor, headline, paying_batch


def plan_of(count: int, total: int) -> Plan:
    devices = [DeviceSpec(f"cuda:{i}", "cuda", i, f"Card {i}", "nvidia") for i in range(count)]
    return plan_on(devices, {"trainer": {"global_batch_size": total}})


def device(per_sample: float, cap: int | None = None) -> DeviceCalibration:
    return DeviceCalibration(SpeedCurve(0.0, per_sample, cap=cap), 0.5, 0.0, 0.0)


SLOW_LINK = Exchange(((1.0, 0),), Channel(0.5))
"""An exchange between two devices that takes one second, whatever the batch."""


def test_a_batch_whose_work_outweighs_the_exchange() -> None:
    devices = [device(0.01), device(0.01)]
    predict = batch_predictor(plan_of(2, 64), devices, SLOW_LINK)
    # Alone 2.56 s at 256 samples, together 1.28 + 1 s; at 128 samples 1.28 s against 1.64 s.
    result = paying_batch(predict, 64, 2)
    assert result is not None
    assert result.batch_size == 256
    assert result.gain == pytest.approx(2.56 / 2.28)


def test_the_own_batch_if_all_devices_pay_with_it() -> None:
    devices = [device(0.01), device(0.03)]
    result = paying_batch(batch_predictor(plan_of(2, 64), devices, Exchange()), 64, 2)
    assert result is not None
    assert result.batch_size == 64
    assert result.gain == pytest.approx(4 / 3)


def test_none_up_to_the_largest_multiple() -> None:
    predict = batch_predictor(plan_of(2, 4), [device(1e-5), device(1e-5)], SLOW_LINK)
    assert paying_batch(predict, 4, 2) is None


def test_no_batch_beyond_the_memory() -> None:
    tried = []

    def predict(batch_size: int) -> BatchPrediction | None:
        tried.append(batch_size)
        return BatchPrediction(batch_size, 1, 1.0) if batch_size <= 32 else None

    assert paying_batch(predict, 8, 2) is None
    assert tried == [8, 16, 32, 64]
    devices = [device(0.01, cap=100), device(0.01, cap=100)]
    result = paying_batch(batch_predictor(plan_of(2, 64), devices, SLOW_LINK), 64, 2)
    assert result == BatchPrediction(128, 2, None)  # one device alone does not hold it


def test_all_of_three_devices_must_pay() -> None:
    devices = [device(0.01), device(0.01), device(0.03)]
    result = paying_batch(batch_predictor(plan_of(3, 64), devices, SLOW_LINK), 64, 3)
    assert result is not None
    assert result.batch_size > 256  # two of them pay from 256 on


def first_line(
    plan: Plan, devices: list[DeviceCalibration], exchange: Exchange, drop_slower: bool = True
) -> str:
    return headline(plan, devices, exchange, choose(plan, devices, exchange, drop_slower))


def test_the_headline_says_how_fast_all_are_beside_the_fastest_alone() -> None:
    line = first_line(plan_of(2, 64), [device(0.03), device(0.01)], Exchange())
    assert line.startswith("Card 0 and Card 1 train together")
    assert "1.33× as fast as the Card 1 alone" in line


def test_the_headline_says_who_is_left_out_and_what_would_change_that() -> None:
    line = first_line(plan_of(2, 64), [device(0.01), device(0.01)], SLOW_LINK)
    # Together 0.32 + 1 s against 0.64 s.
    assert line.startswith("Card 1 is left out: with all devices a step would take 2.06× as long.")
    assert "trainer.global_batch_size=256" in line
    assert "1.12× as fast" in line
    never = first_line(plan_of(2, 4), [device(1e-5), device(1e-5)], SLOW_LINK)
    assert "global_batch_size" not in never


def test_the_headline_is_honest_where_nobody_may_be_left_out() -> None:
    line = first_line(plan_of(2, 64), [device(0.01), device(0.01)], SLOW_LINK, drop_slower=False)
    assert "0.48× as fast as the Card 0 alone" in line
    assert "trainer.global_batch_size=256" in line


def test_equal_cards_have_their_ids_in_the_headline() -> None:
    plan = plan_of(2, 64)
    plan = replace(plan, devices=tuple(replace(d, name="Arc (emulated)") for d in plan.devices))
    line = first_line(plan, [device(0.01), device(0.01)], SLOW_LINK)
    assert line.startswith("Arc (cuda:1) is left out")

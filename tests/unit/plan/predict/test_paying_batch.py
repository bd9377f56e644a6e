"""The smallest batch with which all devices pay."""

from __future__ import annotations

import pytest
from support import plan_on

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.plan.predict.paying_batch import BatchPrediction, batch_predictor, paying_batch


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

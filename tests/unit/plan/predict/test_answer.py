"""The sentence that answers a prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import plan_on

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.device import DeviceSpec
from hetexp.plan.device_estimates import DeviceEstimates
from hetexp.plan.predict.answer import answer, names_of
from hetexp.plan.predict.inputs import PredictedRun
from hetexp.plan.predict.paying_batch import BatchPrediction
from hetexp.plan.predict.runs import Prediction

CARDS = ["RTX 3090 (emulated)", "Arc A770 (emulated)", "T4 (emulated)"]
DEVICES = [DeviceSpec(f"emulated:{i}", "emulated", i, name, "nvidia") for i, name in enumerate(CARDS)]
SINGLE = PredictedRun(None, (0,), (64,), 0.2, 320.0, strategy="single")


def prediction(best: PredictedRun, count: int = 3, paying: BatchPrediction | None = None) -> Prediction:
    plan = plan_on(DEVICES[:count], {"trainer": {"global_batch_size": 64}})
    curves = [DeviceCalibration(SpeedCurve(0.0, 0.1), 0.5, 0.0, 0.0)] * count
    estimates = DeviceEstimates.measured(plan.devices, curves, Exchange())
    rows = (best,) if best is SINGLE else (best, SINGLE)
    return Prediction(plan, estimates, 64, (), rows, best, ("a reason",), preferred="auto", paying=paying)


@pytest.mark.parametrize(
    ("ranks", "count", "policy", "expected"),
    [
        ((0, 1), 2, "auto", "ddp on both devices: 1.25 × as fast as the RTX 3090 alone (`strategy=ddp`)."),
        ((0, 1, 2), 3, "vram", "ddp on all 3 devices: 1.25 × as fast as the RTX 3090 alone (`strategy=ddp "),
        ((0, 1), 3, "auto", "ddp on the RTX 3090 and the Arc A770, without the T4: 1.25 × as fast as"),
    ],
)
def test_several_devices(ranks: tuple[int, ...], count: int, policy: str, expected: str) -> None:
    best = PredictedRun(policy, ranks, (1,) * len(ranks), 0.16, 400.0, strategy="ddp")
    assert answer(prediction(best, count)).startswith(expected)
    assert ("balancing=vram" in answer(prediction(best, count))) == (policy == "vram")


@pytest.mark.parametrize(
    ("paying", "end"),
    [
        (None, "with any batch up to 4,096 samples that fits."),
        (BatchPrediction(256, 3, 1.5), "256` all 3 devices pay, 1.50 × as fast as the fastest alone."),
        (BatchPrediction(256, 2, None), "with `trainer.global_batch_size=256` 2 of 3 devices pay."),
    ],
)
def test_a_device_alone_and_the_batch_that_would_change_it(paying: BatchPrediction | None, end: str) -> None:
    sentence = answer(prediction(SINGLE, paying=paying))
    assert sentence.startswith("The RTX 3090 alone is fastest")
    assert sentence.endswith(end)


def test_no_recommendation_is_the_reason() -> None:
    assert answer(replace(prediction(SINGLE), best=None)) == "a reason"


def test_equal_devices_are_counted() -> None:
    assert names_of([DEVICES[2], DEVICES[0], DEVICES[2]]) == "2 × T4 and the RTX 3090"

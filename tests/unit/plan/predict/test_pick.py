"""Which row `strategy=auto` takes."""

from __future__ import annotations

from typing import Any

import pytest
from support import plan_on

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.device import DeviceSpec
from hetexp.plan.device_estimates import CATALOGUE, MEASURED, DeviceEstimates
from hetexp.plan.predict.inputs import PredictedRun
from hetexp.plan.predict.pick import pick, why_picked
from hetexp.plan.predict.runs import Prediction


def found(*rows: PredictedRun, source: str = MEASURED) -> Prediction:
    plan = plan_on([DeviceSpec("cpu", "cpu", 0, "A CPU", "cpu")], {"trainer": {"global_batch_size": 8}})
    own = DeviceCalibration(SpeedCurve(0.0, 1.0), 0.5, 0.0, 0.0)
    return Prediction(
        plan, DeviceEstimates((own,), (source,), plan.devices, Exchange()), 8, (1.0,), rows, None
    )


def row(strategy: str, seconds: float | None, policy: str | None = "auto", **others: Any) -> PredictedRun:
    return PredictedRun(policy, (0,), (8,), step_seconds=seconds, strategy=strategy, **others)


def name(predict_runs: Prediction) -> str | None:
    picked = pick(predict_runs, "auto")
    return picked.strategy if picked is not None else None


def test_the_fastest_exact_one_that_can_run() -> None:
    rows = (
        row("ddp", 2.0),
        row("ddp", 0.5, "equal"),
        row("independent", 0.1, exact=False),
        row("pipeline", 1.0, problem="does not fit"),
        row("hybrid", 1.5),
        row("single", None, None),
    )
    assert name(found(*rows)) == "hybrid"  # the fastest ddp is another policy's
    assert name(found(rows[2], rows[3])) is None


def test_of_equals_the_simplest() -> None:
    assert (
        name(found(row("dp", 1.0), row("hybrid", 1.0), row("ddp", 1.005), row("single", 1.008, None)))
        == "single"
    )
    assert name(found(row("dp", 1.0), row("hybrid", 1.004), row("ddp", 1.005))) == "ddp"
    assert name(found(row("dp", 1.0), row("hybrid", 1.004))) == "hybrid"
    assert name(found(row("ddp", 1.02), row("single", 1.0, None))) == "single"


@pytest.mark.parametrize(("source", "wins"), [(MEASURED, "single"), (CATALOGUE, "ddp")])
def test_figures_that_are_not_measured_are_corrected(source: str, wins: str) -> None:
    rows = (row("single", 1.0, None), row("ddp", 1.0, measures=True))
    assert name(found(*rows, source=source)) == wins


def test_the_reason_compares_the_others() -> None:
    predict_runs = found(
        row("ddp", 2.0), row("pipeline", 3.0), row("local_sgd", 1.0, exact=False), row("single", None)
    )
    picked = pick(predict_runs, "auto")
    assert picked is not None
    assert why_picked(picked, predict_runs) == (
        "strategy=auto takes ddp: 8 samples are predicted to take 2 s a step (measured); pipeline 3 s."
    )


def test_exact_inside_hosts_only_where_it_is_much_faster() -> None:
    exact = row("ddp", 1.0)
    assert name(found(exact, row("hierarchical_sgd", 0.4, exact=False))) == "hierarchical_sgd"
    assert name(found(exact, row("hierarchical_sgd", 0.6, exact=False))) == "ddp"
    assert name(found(exact, row("hierarchical_sgd", 0.4, exact=False, problem="no memory"))) == "ddp"
    assert name(found(exact, row("local_sgd", 0.1, exact=False))) == "ddp"

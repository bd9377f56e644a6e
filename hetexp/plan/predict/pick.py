"""Picks the strategy of `strategy=auto` from predictions."""

from __future__ import annotations

from hetexp.plan.calibrated_plan import LEAST_GAIN
from hetexp.plan.device_estimates import MEASURED
from hetexp.plan.predict.inputs import PredictedRun
from hetexp.plan.predict.runs import Prediction

SIMPLEST = ("single", "ddp")
"""First choices among equally fast strategies,"""
LAST = ("dp",)
"""and last choice: one process drives all its cards in turn, which the cost model does not know."""

BETWEEN_HOSTS = "hierarchical_sgd"
"""Option that is exact inside each host only, for slow networks between hosts,"""
MUCH_FASTER = 2.0
"""if it is at least so many times as fast as the fastest exact strategy."""


def pick(prediction: Prediction, policy: str) -> PredictedRun | None:
    """Return the row of the fastest exact strategy with a policy; `None` if nothing is predicted.

    `BETWEEN_HOSTS` is taken instead if it is `MUCH_FASTER`. Of rows with a difference too small to measure,
    the simplest is taken. If the figures are not measured, a row whose policy measures comes first, because
    it corrects them.
    """
    fit = [row for row in prediction.rows if row.predicted and row.exact and row.policy in (policy, None)]
    if not fit:
        return None
    fastest = min(row.step_seconds or 0.0 for row in fit)
    near = [row for row in fit if (row.step_seconds or 0.0) * (1 - LEAST_GAIN) <= fastest]
    measured = all(source == MEASURED for source in prediction.estimates.sources)

    def order(row: PredictedRun) -> tuple[bool, int, float]:
        rank = SIMPLEST.index(row.strategy) if row.strategy in SIMPLEST else len(SIMPLEST)
        return row.measures == measured, rank + (row.strategy in LAST), row.step_seconds or 0.0

    exact = min(near, key=order)
    between = [
        row
        for row in prediction.rows
        if row.strategy == BETWEEN_HOSTS and row.predicted and row.policy in (policy, None)
    ]
    quick = [r for r in between if (r.step_seconds or 0.0) * MUCH_FASTER <= (exact.step_seconds or 0.0)]
    return min(quick, key=lambda row: row.step_seconds or 0.0, default=exact)


def why_picked(row: PredictedRun, prediction: Prediction) -> str:
    """Return the predicted step of the picked row, compared with the best rows of other strategies."""
    sources = " and ".join(dict.fromkeys(prediction.estimates.sources))
    others: dict[str, PredictedRun] = {}
    for other in prediction.rows:
        best = others.setdefault(other.strategy, other)
        if other.exact and other.predicted and (other.step_seconds or 0.0) < (best.step_seconds or 0.0):
            others[other.strategy] = other
    times = [
        f"{name} {other.step_seconds:.4g} s"
        for name, other in others.items()
        if name != row.strategy and other.exact and other.predicted and other.step_seconds is not None
    ]
    compared = f"; {', '.join(times)}" if times else ""
    note = (
        " Its steps are those of one device inside each host only, and the hosts meet now and then; "
        "strategy.between_hosts=false takes exact ones only."
        if not row.exact
        else ""
    )
    return (
        f"strategy=auto takes {row.strategy}: {prediction.total} samples are predicted to take "
        f"{row.step_seconds:.4g} s a step ({sources}){compared}.{note}"
    )

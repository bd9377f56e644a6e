"""Which of the predicted strategies `strategy=auto` takes."""

from __future__ import annotations

from hetexp.plan.calibrated_plan import LEAST_GAIN
from hetexp.plan.device_estimates import MEASURED
from hetexp.plan.predict.inputs import PredictedRun
from hetexp.plan.predict.runs import Prediction

SIMPLEST = ("single", "ddp")
"""Of strategies that are as fast as each other these come first,"""
LAST = ("dp",)
"""and these last: one process drives all its cards in turn, which no figure here knows of."""

BETWEEN_HOSTS = "hierarchical_sgd"
"""Option that is exact inside each host only, taken where a step waits for the network between them:"""
MUCH_FASTER = 2.0
"""so many times as fast as the fastest exact one, at least."""


def pick(found: Prediction, policy: str) -> PredictedRun | None:
    """Return the row of the fastest exact strategy with a policy, `None` where nothing is predicted.

    One that is exact inside each host, where it is among the rows of several hosts, is taken before it if it
    is `MUCH_FASTER`.

    Of rows whose difference cannot be measured the simplest is taken; but where the figures are not measured,
    one whose policy measures, since it corrects them.
    """
    fit = [row for row in found.rows if row.predicted and row.exact and row.policy in (policy, None)]
    if not fit:
        return None
    fastest = min(row.step_seconds or 0.0 for row in fit)
    near = [row for row in fit if (row.step_seconds or 0.0) * (1 - LEAST_GAIN) <= fastest]
    measured = all(source == MEASURED for source in found.estimates.sources)

    def order(row: PredictedRun) -> tuple[bool, int, float]:
        rank = SIMPLEST.index(row.strategy) if row.strategy in SIMPLEST else len(SIMPLEST)
        return row.measures == measured, rank + (row.strategy in LAST), row.step_seconds or 0.0

    exact = min(near, key=order)
    between = [
        row
        for row in found.rows
        if row.strategy == BETWEEN_HOSTS and row.predicted and row.policy in (policy, None)
    ]
    quick = [r for r in between if (r.step_seconds or 0.0) * MUCH_FASTER <= (exact.step_seconds or 0.0)]
    return min(quick, key=lambda row: row.step_seconds or 0.0, default=exact)


def why_picked(row: PredictedRun, found: Prediction) -> str:
    """Say what the picked row takes, and what the best of the others would."""
    sources = " and ".join(dict.fromkeys(found.estimates.sources))
    others: dict[str, PredictedRun] = {}
    for other in found.rows:
        known = others.setdefault(other.strategy, other)
        if other.exact and other.predicted and (other.step_seconds or 0.0) < (known.step_seconds or 0.0):
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
        f"strategy=auto takes {row.strategy}: {found.total} samples are predicted to take "
        f"{row.step_seconds:.4g} s a step ({sources}){compared}.{note}"
    )

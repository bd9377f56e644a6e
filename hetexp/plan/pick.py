"""Which of the predicted strategies `strategy=auto` takes."""

from __future__ import annotations

from hetexp.plan.known import MEASURED
from hetexp.plan.measured import LEAST_GAIN
from hetexp.plan.predict import Forecast
from hetexp.plan.scene import Row

SIMPLEST = ("single", "ddp")
"""Of strategies that are as fast as each other these come first,"""
LAST = ("dp",)
"""and these last: one process drives all its cards in turn, which no figure here knows of."""


def pick(found: Forecast, policy: str) -> Row | None:
    """Return the row of the fastest exact strategy with a policy, `None` where nothing is predicted.

    Of rows whose difference cannot be measured the simplest is taken; but where the figures are not measured,
    one whose policy measures, since it corrects them.
    """
    fit = [row for row in found.rows if row.predicted and row.exact and row.policy in (policy, None)]
    if not fit:
        return None
    fastest = min(row.step_seconds or 0.0 for row in fit)
    near = [row for row in fit if (row.step_seconds or 0.0) * (1 - LEAST_GAIN) <= fastest]
    measured = all(source == MEASURED for source in found.known.sources)

    def order(row: Row) -> tuple[bool, int, float]:
        rank = SIMPLEST.index(row.strategy) if row.strategy in SIMPLEST else len(SIMPLEST)
        return row.measures == measured, rank + (row.strategy in LAST), row.step_seconds or 0.0

    return min(near, key=order)


def why_picked(row: Row, found: Forecast) -> str:
    """Say what the picked row takes, and what the best of the others would."""
    sources = " and ".join(dict.fromkeys(found.known.sources))
    others: dict[str, Row] = {}
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
    return (
        f"strategy=auto takes {row.strategy}: {found.total} samples are predicted to take "
        f"{row.step_seconds:.4g} s a step ({sources}){compared}."
    )

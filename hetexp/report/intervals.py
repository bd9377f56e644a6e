"""Means over seeds, of values and of ratios, with their confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hetexp.report.results import Interval

CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of the values and its 95 % confidence interval; `None` without values.

    Source: Student (1908), The probable error of a mean, Biometrika 6.
    """
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, len(values))
    half = _quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """Return the geometric mean of ratios and its 95 % confidence interval; `None` without ratios.

    The interval is Student's of the logarithms: so A over B is the inverse of B over A, and no bound is below
    0. Source of the mean: Fleming and Wallace (1986), How not to lie with statistics: the correct way to
    summarize benchmark results, Communications of the ACM 29.

    Args:
        ratios: above 0, one a pair of runs.
    """
    logarithms = interval([math.log(ratio) for ratio in ratios])
    if logarithms is None:
        return None
    low = math.exp(logarithms.low) if logarithms.low is not None else None
    high = math.exp(logarithms.high) if logarithms.high is not None else None
    return replace(logarithms, mean=math.exp(logarithms.mean), low=low, high=high)


def overlap(first: Interval, second: Interval) -> bool | None:
    """Return whether two intervals share a value; `None` if one of them has no bounds."""
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return None
    return first.low <= second.high and second.low <= first.high


@cache
def _quantile(freedom: int) -> float:
    """Return Student's t of a two-sided interval, by its degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))

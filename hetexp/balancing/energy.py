"""Splits by power: the fastest within a budget of watts, or the least energy with a slightly longer step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetexp.balancing.solver import FINE, TIE, Counts, Floats, Table, solve, step_times
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.split import Split

Flags = NDArray[np.bool_]

EXACT_DEVICES = 14
"""Most devices whose sets are all tried (2^14 sets)."""


def solve_within_watts(
    curves: Sequence[SpeedCurve],
    total: int,
    watts: Sequence[float],
    budget_watts: float,
    minimum: Sequence[int] | None = None,
    caps: Sequence[int | None] | None = None,
    communication: float | Sequence[float] = 0.0,
) -> Split:
    """Return the fastest split whose devices with samples together draw no more than the budget.

    It is exact up to 14 devices. Of equally fast sets it takes the one with the lowest power, then the one
    with the lower ranks. More devices are taken by samples per watt, which may miss the best set.

    Args:
        curves: of each rank.
        total: samples of the global batch.
        watts: power of each working device.
        budget_watts: largest power of all devices together.
        minimum: as for `solve`.
        caps: as for `solve`.
        communication: as for `solve`.

    Raises:
        ValueError: as `solve`; or no set of devices within the budget can take the batch.
    """
    table = Table(curves, total, minimum, caps, communication)
    draw = np.array(watts, dtype=float)
    if len(draw) != len(curves) or not np.all(draw >= 0) or not np.all(np.isfinite(draw)):
        raise ValueError(f"watts must be {len(curves)} numbers, 0 or more, one a rank, not {list(watts)}")
    sets = _sets(draw, budget_watts, table.least > 0)
    chosen = _fastest(table, total, draw, budget_watts, sets)
    if chosen is None:
        raise ValueError(
            f"a budget of {budget_watts:g} W must be enough for devices that take the batch of {total} "
            f"samples, but is not: the devices draw {', '.join(f'{w:g}' for w in draw[:10])} W"
        )
    allowed = [int(most) if used else 0 for most, used in zip(table.most, chosen, strict=True)]
    return solve(curves, total, minimum, allowed, communication)


def solve_for_energy(
    curves: Sequence[SpeedCurve],
    total: int,
    joules_per_sample: Sequence[float],
    tolerance: float = 0.05,
    minimum: Sequence[int] | None = None,
    caps: Sequence[int | None] | None = None,
    communication: float | Sequence[float] = 0.0,
) -> Split:
    """Return the split with the least energy of those at most `tolerance` slower than the fastest.

    Devices with equal energy per sample share their part for the shortest step.

    Args:
        curves: of each rank.
        total: samples of the global batch.
        joules_per_sample: energy of each device for one more sample.
        tolerance: fraction of the fastest step by which a step may be longer, 0 or more.
        minimum: as for `solve`.
        caps: as for `solve`.
        communication: as for `solve`.

    Raises:
        ValueError: as `solve`.
    """
    if len(joules_per_sample) != len(curves) or any(not joules >= 0 for joules in joules_per_sample):
        raise ValueError(f"joules per sample must be {len(curves)} numbers, 0 or more, one a rank")
    if not tolerance >= 0:
        raise ValueError(f"the tolerance must be 0 or more, not {tolerance}")
    table = Table(curves, total, minimum, caps, communication)
    fastest = max(step_times(curves, solve(curves, total, minimum, caps, communication), communication))
    most = table.counts(fastest * (1 + tolerance) * (1 + TIE))
    tails = table.idle - np.array([curve.update_seconds for curve in curves])
    counts = [0] * len(curves)
    left = total - int(table.least.sum())
    for joules in sorted(set(joules_per_sample)):
        ranks = [r for r, needed in enumerate(joules_per_sample) if needed == joules]
        taken = min(left, int((most - table.least)[ranks].sum()))
        part = solve(
            [curves[r] for r in ranks],
            taken + int(table.least[ranks].sum()),
            [int(table.least[r]) for r in ranks],
            [int(most[r]) for r in ranks],
            [float(tails[r]) for r in ranks],
        )
        for rank, count in zip(ranks, part.counts, strict=True):
            counts[rank] = count
        left -= taken
    return Split(tuple(counts))


def _sets(draw: Floats, budget: float, forced: Flags) -> Floats | None:
    """Return the sets within the budget, as rows of 0 and 1; `None` if there are too many devices."""
    if len(draw) > EXACT_DEVICES:
        return None
    every = (np.arange(2 ** len(draw))[:, None] >> np.arange(len(draw))) & 1
    fits = (every @ draw <= budget * (1 + TIE)) & np.all(every >= forced, axis=1)
    chosen: Floats = every[fits].astype(float)
    return chosen


def _fastest(table: Table, total: int, draw: Floats, budget: float, sets: Floats | None) -> Flags | None:
    """Return which devices work; `None` if no set within the budget takes the batch."""

    def choice(seconds: float) -> Flags | None:
        counts = table.counts(seconds)
        if sets is None:
            return _greedy(counts, table.least > 0, total, draw, budget)
        enough = sets[sets @ counts >= total]
        return enough[np.argmin(enough @ draw)] > 0 if len(enough) else None

    low, high = 0.0, float(np.max(table.seconds(table.most)))
    if choice(high) is None:
        return None
    while high - low > FINE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if choice(middle) is None else (low, middle)
    chosen = choice(high * (1 + TIE))
    return choice(high) if chosen is None else chosen  # with more time the greedy choice may fail


def _greedy(counts: Counts, forced: Flags, total: int, draw: Floats, budget: float) -> Flags | None:
    """Return the devices with the most samples per watt within the budget, if they take the batch."""
    worth = np.where(draw > 0, counts / np.where(draw > 0, draw, 1.0), np.inf)
    used, watts = np.zeros(len(draw), dtype=bool), 0.0
    for rank in np.lexsort((-worth, ~forced)):
        if watts + draw[rank] <= budget * (1 + TIE) and counts[rank] > 0:
            used[rank], watts = True, watts + float(draw[rank])
    done = counts[used].sum() >= total and not np.any(forced & ~used)
    return used if done else None

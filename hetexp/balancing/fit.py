"""From measured passes to a speed curve: a straight line, a line with one kink, or what was measured itself.

Errors are relative: a pass that takes twice as long jitters twice as much. Single slow passes count for
little, and far ones for nothing: least squares, reweighted again and again, first by Huber's weights (Robust
Estimation of a Location Parameter, 1964), then, from where these lead, by Tukey's biweight (Beaton and Tukey,
1974), since what disturbs a device only ever makes it slower. A fit is made once and handed to all ranks: its
last digits may differ by platform.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetexp.core.cost.speed import SpeedCurve

Point = tuple[int, float]
"""Samples of a pass, seconds."""
Floats = NDArray[np.float64]

HUBER = 1.5
"""Residuals up to so many times their spread count in full."""
ITERATIONS = 5
BIWEIGHT = 4.7
"""Residuals from so many times their spread on count for nothing."""
BIWEIGHT_ITERATIONS = 3
LEAST_WEIGHT = 1e-8
"""What counts for nothing keeps this much, so that the equations stay solvable."""
TO_DEVIATION = 1.4826
"""From the median distance of normal values to their standard deviation."""
SMALLEST_SPREAD = 1e-4
"""Relative; clocks tell no less. Below it a kink is not worth two more numbers."""
KINK_PAYS = 6.0
"""How much a kink must lower the Bayesian information criterion (Schwarz, 1978); this much is strong evidence
(Kass and Raftery, 1995)."""
KINKS_TRIED = 32
COMMON_PASSES = 3
GRADE = 1.6
"""From one size to measure to the next."""
FAR = 6.0
"""When two shapes are compared, distances count up to so many times what passes of one size spread (Tukey's
biweight loss): else the shape that happens to pass nearer to a few stray passes would win."""
CURVED = 3.0
"""Where the median of a size lies so many times further from the fit than passes spread around their median,
the shape is neither a line nor a line with a kink, and the medians themselves are the curve."""
CURVED_AT_LEAST = 0.05
"""Relative distance below which the simple shape is good enough."""


@dataclass(frozen=True)
class Check:
    """How far a curve is from passes that it was not made from; fractions of the measured seconds."""

    median_error: float
    p95_error: float
    worst_error: float
    worst_size: int
    """Samples of the pass that it is furthest from."""
    num_points: int


@dataclass(frozen=True)
class Fit:
    """A curve and how far to trust it."""

    curve: SpeedCurve
    shape: Literal["line", "kink", "points"]
    spread: float
    """Standard deviation of single passes around the curve, from their median distance, as a fraction."""
    standard_error: float
    """Of the curve at the measured size where it is least sure, as a fraction."""
    num_points: int
    smallest_size: int
    largest_size: int
    """Between these two the curve is measured; beyond, it is the last line drawn on."""

    def check(self, points: Iterable[Point]) -> Check:
        """Compare the curve with other measured passes.

        Raises:
            ValueError: there are none.
        """
        errors = sorted((abs(self.curve.pass_seconds(size) / s - 1), size) for size, s in _checked(points))
        return Check(
            median_error=statistics.median(error for error, _ in errors),
            p95_error=errors[math.ceil(0.95 * len(errors)) - 1][0],
            worst_error=errors[-1][0],
            worst_size=errors[-1][1],
            num_points=len(errors),
        )


def fit_curve(points: Iterable[Point]) -> Fit:
    """Fit the seconds of single passes, forward and backward together.

    The caller leaves out warm-up passes. Several passes of each size tell jitter from shape. One size alone
    gives a line through zero.

    Args:
        points: one or more, in any order; sizes repeat.

    Raises:
        ValueError: there are no points, or one cannot have been measured.
    """
    measured = _checked(points)
    sizes = sorted({size for size, _ in measured})
    medians = {size: statistics.median(s for n, s in measured if n == size) for size in sizes}
    if len(sizes) == 1:
        ((size, middle),) = medians.items()
        spread = _spread([s / middle - 1 for _, s in measured])
        through_zero = SpeedCurve(0.0, middle / size)
        return Fit(through_zero, "line", spread, _of_median(spread, len(measured)), len(measured), size, size)
    # A size's median is often one of its passes; that one tells nothing of jitter.
    apart = [s / medians[size] - 1 for size, s in measured if s != medians[size]]
    within = _spread(apart) if apart else math.inf
    # Where each size has one pass only, all distances count.
    model = _best_model(measured, medians, sizes, max(within, SMALLEST_SPREAD) if apart else 1.0)
    curve, error = model.curve(), model.standard_error()
    shape: Literal["line", "kink", "points"] = "kink" if curve.kinks else "line"
    unsure = median_errors(measured)
    far = [
        size
        for size, seconds in medians.items()
        if abs(curve.pass_seconds(size) / seconds - 1)
        > max(CURVED_AT_LEAST, CURVED * within, CURVED * unsure[size])
    ]
    # One size alone may be what a busy moment made of it; a shape shows at two.
    if len(sizes) > 2 and len(far) > 1:
        curve, shape = SpeedCurve.through(sorted(medians.items())), "points"
        fewest = min(sum(n == size for n, _ in measured) for size in sizes)
        error = _of_median(within, fewest)
    spread = _spread([s / curve.pass_seconds(size) - 1 for size, s in measured])
    return Fit(curve, shape, spread, error, len(measured), sizes[0], sizes[-1])


def median_errors(points: Iterable[Point]) -> dict[int, float]:
    """Return how unsure the median of each size is: its standard error, as a fraction of it.

    Few passes of a size may agree, or differ, by chance: how all sizes spread in the median counts as much as
    `COMMON_PASSES` of its own. Of one pass a size nothing is known, and the error is infinite.
    """
    groups: dict[int, list[float]] = {}
    for size, seconds in points:
        groups.setdefault(size, []).append(seconds)
    variances = {}
    for size, group in groups.items():
        middle = statistics.median(group)
        if len(group) > 1:  # from the mean distance, of which one stray pass makes less than of squares
            away = sum(abs(seconds / middle - 1) for seconds in group) / (len(group) - 1)
            variances[size] = away * away * math.pi / 2
    common = statistics.median(variances.values()) if variances else math.inf
    errors = {}
    for size, group in groups.items():
        freedom = len(group) - 1
        both = variances.get(size, 0.0) * freedom + common * COMMON_PASSES
        errors[size] = _of_median(math.sqrt(both / (freedom + COMMON_PASSES)), len(group))
    return errors


def sizes_to_measure(largest: int, count: int = 8) -> list[int]:
    """Return which batch sizes to measure, rising up to `largest`, each about 5/8 of the next.

    Small passes show the fixed cost and large ones the slope. With emulated cards whose kink may be
    anywhere, halving predicts worse: kinks above half of `largest` go unseen. All sizes together take
    2.7 times as long as the largest. A small `largest` makes them denser.

    Args:
        largest: most samples of a pass that a split may ask for.
        count: of sizes, where there are as many.
    """
    if largest < 1 or count < 1:
        raise ValueError(f"largest size and count must be 1 or more, not {largest} and {count}")
    ratio = min(GRADE, largest ** (1 / max(count - 1, 1)))
    return sorted({max(round(largest / ratio**i), 1) for i in range(count)})


class _Model:
    """Seconds = fixed + first · samples up to the kink + second · samples beyond it, none below zero."""

    def __init__(
        self, measured: Sequence[Point], medians: dict[int, float], kink: int | None, noise: float
    ) -> None:
        self.kink = kink
        self._scale = max(medians)  # columns of a like size solve well
        self._rows = self._columns([size for size, _ in measured])
        seconds = np.array([s for _, s in measured])
        middle = np.array([medians[size] for size, _ in measured])
        expected = middle
        for iteration in range(ITERATIONS + BIWEIGHT_ITERATIONS):
            off = np.abs(seconds / expected - 1)
            self._spread = max(TO_DEVIATION * float(np.median(off)), SMALLEST_SPREAD)
            if iteration < ITERATIONS:
                weights = np.minimum(1.0, HUBER * self._spread / np.maximum(off, SMALLEST_SPREAD))
            else:
                near = 1 - np.minimum(off / (BIWEIGHT * self._spread), 1.0) ** 2
                weights = np.maximum(near**2, LEAST_WEIGHT)
            self._weighted = self._rows * (np.sqrt(weights) / expected)[:, None]
            self.factors = _not_negative(self._weighted, np.sqrt(weights) * seconds / expected)
            # Errors count by what is expected, but a bad fit on the way must not make its own errors small.
            expected = np.clip(self._rows @ self.factors, middle / 2, middle * 2)
        far = FAR * noise
        near = 1 - np.minimum(np.abs(seconds / expected - 1) / far, 1.0) ** 2
        variance = max(float(np.mean(far**2 / 3 * (1 - near**3))), SMALLEST_SPREAD**2)
        numbers = len(self.factors) + (kink is not None)
        self.criterion = len(seconds) * math.log(variance) + numbers * math.log(len(seconds))
        """Bayesian information criterion: the less, the better."""

    def _columns(self, sizes: Sequence[int]) -> Floats:
        of = np.array(sizes, dtype=float)
        ends = np.minimum(of, self.kink or np.inf), np.maximum(of - (self.kink or np.inf), 0.0)
        used = ends if self.kink is not None else ends[:1]
        return np.column_stack([np.ones(len(of)), *(column / self._scale for column in used)])

    def curve(self) -> SpeedCurve:
        fixed, first, *second = self.factors.tolist()
        kinks = tuple((at, slope / self._scale) for at, slope in zip([self.kink or 0], second, strict=False))
        return SpeedCurve(fixed, first / self._scale, kinks)

    def standard_error(self) -> float:
        """Return the largest at a measured size, relative to the seconds there."""
        used = self.factors > 0
        rows, weighted = self._rows[:, used], self._weighted[:, used]
        around = np.linalg.inv(weighted.T @ weighted)
        variance = np.einsum("ij,jk,ik->i", rows, around, rows)
        freedom = max(len(rows) - len(self.factors) - (self.kink is not None), 1)
        widened = self._spread * math.sqrt(len(rows) / freedom)
        return float(np.max(np.sqrt(variance) / (self._rows @ self.factors))) * widened


def _not_negative(rows: Floats, seconds: Floats) -> Floats:
    """Return the factors, 0 or more, with the least squares: the best of all choices of which are above 0."""
    count = rows.shape[1]
    best, least = np.zeros(count), math.inf
    for size in range(count, 0, -1):
        for chosen in map(list, combinations(range(count), size)):
            part = rows[:, chosen]
            normal = part.T @ part
            with suppress(np.linalg.LinAlgError):  # singular: columns that the sizes do not tell apart at all
                factors = np.linalg.solve(normal, part.T @ seconds)
                if min(factors.tolist()) < 0:
                    continue
                squares = float(np.sum((part @ factors - seconds) ** 2))
                # Asked last, as it takes longest: whether the sizes tell these columns apart well enough.
                if squares < least and not np.linalg.cond(normal) > 1e12:
                    best, least = np.zeros(count), squares
                    best[chosen] = factors
        if size == count and least < math.inf:
            break  # no limit binds
    return best


def _checked(points: Iterable[Point]) -> list[Point]:
    measured = list(points)
    if not measured:
        raise ValueError("a curve needs one measured pass or more, but there is none")
    for size, seconds in measured:
        if size < 1 or not math.isfinite(seconds) or seconds <= 0:
            raise ValueError(f"a measured pass has samples and takes time, not {size} in {seconds} s")
    return measured


def _best_model(
    measured: Sequence[Point], medians: dict[int, float], sizes: Sequence[int], noise: float
) -> _Model:
    """Return the line, or the line with a kink where that pays; `noise` is how passes of one size spread."""
    line = best = _Model(measured, medians, None, noise)
    if len(sizes) < 4:
        return line
    # Two sizes or more on either side of the kink, its own counted on both.
    tried = _between(sizes[1], sizes[-2])
    for _ in range(2):  # all over, then closer around the best
        best = min((_Model(measured, medians, at, noise) for at in tried), key=lambda model: model.criterion)
        at = tried.index(best.kink or 0)
        tried = _between(tried[max(at - 1, 0)], tried[min(at + 1, len(tried) - 1)])
    return best if best.criterion + KINK_PAYS < line.criterion else line


def _between(low: int, high: int) -> list[int]:
    """Return sizes from one to the other, each by about the same factor larger."""
    return sorted({round(low * (high / low) ** (i / KINKS_TRIED)) for i in range(KINKS_TRIED + 1)})


def _of_median(spread: float, num_values: int) -> float:
    """Return the standard error of a median of normal values."""
    return 1.25 * spread / math.sqrt(num_values)


def _spread(relative: Iterable[float]) -> float:
    """Return the standard deviation that the median distance from zero tells of, for normal errors."""
    return TO_DEVIATION * statistics.median(map(abs, relative))

"""Fits a speed curve to measured passes: a straight line, a line with one kink, or the measured points.

Errors are relative: the noise of a pass is proportional to its time. Disturbances only make a device slower,
so that slow passes count little, and very slow ones not at all. The method is iteratively reweighted least
squares, first with Huber's weights (Robust Estimation of a Location Parameter, 1964), then with Tukey's
biweight (Beaton and Tukey, 1974). A fit is made once for all ranks, because its last digits may differ by
platform.
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
"""Largest residual with full weight, in units of the spread."""
ITERATIONS = 5
BIWEIGHT = 4.7
"""Smallest residual without weight, in units of the spread."""
BIWEIGHT_ITERATIONS = 3
LEAST_WEIGHT = 1e-8
"""Smallest weight, so that the equations stay solvable."""
TO_DEVIATION = 1.4826
"""Standard deviation ÷ median distance of normal values."""
SMALLEST_SPREAD = 1e-4
"""Smallest relative spread, by the resolution of clocks; below it a kink is not worth two more parameters."""
KINK_PAYS = 6.0
"""Least decrease of the Bayesian information criterion (Schwarz, 1978) for a kink, which is strong evidence
(Kass and Raftery, 1995)."""
KINKS_TRIED = 32
COMMON_PASSES = 3
GRADE = 1.6
"""Ratio of neighbouring sizes to measure."""
FAR = 6.0
"""Largest distance that counts when two shapes are compared, in units of the spread within a size (Tukey's
biweight loss). Otherwise a few outliers would decide."""
CURVED = 3.0
"""Distance of a size's median from the fit, in units of the spread around medians, from which the measured
points are the curve."""
CURVED_AT_LEAST = 0.05
"""Relative distance below which a simple shape is good enough."""


@dataclass(frozen=True)
class Check:
    """The errors of a curve on other measured passes, as fractions of the measured seconds."""

    median_error: float
    p95_error: float
    worst_error: float
    worst_size: int
    """Samples of the pass with the worst error."""
    num_points: int


@dataclass(frozen=True)
class Fit:
    """A fitted curve with its errors."""

    curve: SpeedCurve
    shape: Literal["line", "kink", "points"]
    spread: float
    """Standard deviation of single passes around the curve, from their median distance, as a fraction."""
    standard_error: float
    """Largest standard error of the curve at a measured size, as a fraction."""
    num_points: int
    smallest_size: int
    largest_size: int
    """Largest measured size; beyond it the last line is extended."""

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

    The caller leaves out warm-up passes. Several passes of each size separate noise from shape. A single size
    gives a line through zero.

    Args:
        points: one or more, in any order; sizes may repeat.

    Raises:
        ValueError: there are no points, or one cannot have been measured.
    """
    measured = sorted(_checked(points))
    sizes = sorted({size for size, _ in measured})
    medians = {size: statistics.median(s for n, s in measured if n == size) for size in sizes}
    if len(sizes) == 1:
        ((size, middle),) = medians.items()
        spread = _spread([s / middle - 1 for _, s in measured])
        through_zero = SpeedCurve(0.0, middle / size)
        return Fit(through_zero, "line", spread, _of_median(spread, len(measured)), len(measured), size, size)
    # A size's median is often one of its passes, which does not count for the spread.
    apart = [s / medians[size] - 1 for size, s in measured if s != medians[size]]
    within = _spread(apart) if apart else math.inf
    # If each size has only one pass, all distances count.
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
    # A single size may be disturbed, but two sizes show a shape.
    if len(sizes) > 2 and len(far) > 1:
        curve, shape = SpeedCurve.through(sorted(medians.items())), "points"
        fewest = min(sum(n == size for n, _ in measured) for size in sizes)
        error = _of_median(within, fewest)
    spread = _spread([s / curve.pass_seconds(size) - 1 for size, s in measured])
    return Fit(curve, shape, spread, error, len(measured), sizes[0], sizes[-1])


def median_errors(points: Iterable[Point]) -> dict[int, float]:
    """Return the standard error of each size's median, as a fraction of it.

    The spread of few passes may be chance, so that the median spread of all sizes counts like `COMMON_PASSES`
    passes of the size. With one pass of each size the error is infinite.
    """
    groups: dict[int, list[float]] = {}
    for size, seconds in points:
        groups.setdefault(size, []).append(seconds)
    variances = {}
    for size, group in groups.items():
        middle = statistics.median(group)
        if len(group) > 1:  # from the mean distance, on which an outlier has less influence than on squares
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

    Small passes show the fixed cost, and large ones the slope. Halving would miss kinks above half of
    `largest`. All sizes together take 2.7 times as long as the largest. A small `largest` makes them denser.

    Args:
        largest: most samples of a pass in any split.
        count: number of sizes, if there are enough.
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
        self._scale = max(medians)  # columns of similar size are well conditioned
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
            # Errors are relative to the expected seconds; a bad intermediate fit must not hide its errors.
            expected = np.clip(self._rows @ self.factors, middle / 2, middle * 2)
        far = FAR * noise
        near = 1 - np.minimum(np.abs(seconds / expected - 1) / far, 1.0) ** 2
        variance = max(float(np.mean(far**2 / 3 * (1 - near**3))), SMALLEST_SPREAD**2)
        numbers = len(self.factors) + (kink is not None)
        self.criterion = len(seconds) * math.log(variance) + numbers * math.log(len(seconds))
        """Bayesian information criterion: the less, the better."""

    @property
    def takes_time(self) -> bool:
        """Whether a pass over one sample takes some time, as that of any device does."""
        return float(self.factors[0] + self.factors[1]) > 0

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
        """Return the largest standard error at a measured size, as a fraction of its seconds."""
        used = self.factors > 0
        rows, weighted = self._rows[:, used], self._weighted[:, used]
        around = np.linalg.inv(weighted.T @ weighted)
        variance = np.einsum("ij,jk,ik->i", rows, around, rows)
        freedom = max(len(rows) - len(self.factors) - (self.kink is not None), 1)
        widened = self._spread * math.sqrt(len(rows) / freedom)
        return float(np.max(np.sqrt(variance) / (self._rows @ self.factors))) * widened


def _not_negative(rows: Floats, seconds: Floats) -> Floats:
    """Return the non-negative factors with the least squares, by trying which of them are above 0."""
    count = rows.shape[1]
    best, least = np.zeros(count), math.inf
    for size in range(count, 0, -1):
        for chosen in map(list, combinations(range(count), size)):
            part = rows[:, chosen]
            normal = part.T @ part
            with suppress(np.linalg.LinAlgError):  # singular: the sizes do not separate these columns
                factors = np.linalg.solve(normal, part.T @ seconds)
                if min(factors.tolist()) < 0:
                    continue
                squares = float(np.sum((part @ factors - seconds) ** 2))
                # Last, because it takes longest: whether the sizes separate these columns well enough.
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
    """Return the line, or the line with a kink if that pays.

    Args:
        noise: spread of passes of one size.
    """
    line = best = _Model(measured, medians, None, noise)
    if len(sizes) < 4:
        return line
    # At least two sizes lie on either side of the kink, whose own size counts on both.
    tried = _between(sizes[1], sizes[-2])
    for _ in range(2):  # over all sizes, then around the best
        models = [_Model(measured, medians, at, noise) for at in tried]
        best = min(models, key=lambda model: (not model.takes_time, model.criterion))
        at = tried.index(best.kink or 0)
        tried = _between(tried[max(at - 1, 0)], tried[min(at + 1, len(tried) - 1)])
    return best if best.takes_time and best.criterion + KINK_PAYS < line.criterion else line


def _between(low: int, high: int) -> list[int]:
    """Return sizes between two sizes, with about the same ratio from each to the next."""
    return sorted({round(low * (high / low) ** (i / KINKS_TRIED)) for i in range(KINKS_TRIED + 1)})


def _of_median(spread: float, num_values: int) -> float:
    """Return the standard error of a median of normal values."""
    return 1.25 * spread / math.sqrt(num_values)


def _spread(relative: Iterable[float]) -> float:
    """Return the standard deviation of normal errors, from their median distance from zero."""
    return TO_DEVIATION * statistics.median(map(abs, relative))

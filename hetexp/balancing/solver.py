"""Solves for the split with the shortest step: integer samples of each device, from their speed curves.

Bisection finds the lowest step time (the level) within which all devices together can do the batch. Only
elementwise arithmetic and integer sums decide, so that the answer is the same on every platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.split import Split

TIE = 1e-9
"""Times that differ by less than this fraction count as equal, so that no rounding error decides."""
FINE = 1e-12
"""Relative width at which bisection ends."""
_LISTED = 10
"""Most ranks that a message names."""

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def solve(
    curves: Sequence[SpeedCurve],
    total: int,
    minimum: Sequence[int] | None = None,
    caps: Sequence[int | None] | None = None,
    communication: float | Sequence[float] = 0.0,
) -> Split:
    """Return the split of `total` samples whose slowest device ends first.

    Of such splits it takes the one with the fewest devices busy to the end. On curves that rise everywhere,
    the ranks' times, sorted from the longest, are the smallest in lexicographic order. Of equal devices the
    lower rank takes more. Times within 1e-9 of each other are equal. A device that would be late with a
    single sample gets none. If a curve falls when a further pass begins, `SpeedCurve.level` counts.

    Args:
        curves: of each rank, maybe with a cap of their own.
        total: samples of the global batch.
        minimum: fewest samples of each rank.
        caps: most samples of each rank; `None`: no limit.
        communication: seconds after the work, for all ranks or for each, also without samples.

    Raises:
        ValueError: the caps cannot hold the batch, or the minimum shares exceed it or a cap.
    """
    table = Table(curves, total, minimum, caps, communication)
    return Split(tuple(table.fill(total).tolist()))


def step_times(
    curves: Sequence[SpeedCurve], split: Split, communication: float | Sequence[float] = 0.0
) -> tuple[float, ...]:
    """Return each rank's own seconds of a step, `communication` included; the largest is the step's."""
    tails = _per_rank(communication, len(curves))
    return tuple(c.seconds(n) + tail for c, n, tail in zip(curves, split.counts, tails, strict=True))


@dataclass(frozen=True)
class Ceiling:
    """The best result that the curves allow. Efficiency and the three losses sum to 1."""

    split: Split
    step_seconds: float
    efficiency: float
    """Throughput ÷ sum of the throughputs of each device alone with the same global batch."""
    fixed: float
    """Loss by the fixed costs of each device for a smaller batch; below 0 if smaller passes cost less per
    sample."""
    rounding: float
    """Loss because samples are whole."""
    communication: float
    """Loss by the seconds after the work."""
    solo_samples_per_second: tuple[float, ...]
    """Throughput of each device alone, with the whole batch or its cap; 0 if it may take no samples."""


def solo_rates(curves: Sequence[SpeedCurve], total: int) -> tuple[float, ...]:
    """Return each device's samples per second alone, with the whole batch or its cap; 0 if it takes none."""
    alone = [total if curve.cap is None else min(total, curve.cap) for curve in curves]
    return tuple(n / curve.seconds(n) if n else 0.0 for curve, n in zip(curves, alone, strict=True))


def ceiling(
    curves: Sequence[SpeedCurve],
    total: int,
    minimum: Sequence[int] | None = None,
    caps: Sequence[int | None] | None = None,
    communication: float | Sequence[float] = 0.0,
) -> Ceiling:
    """Return the best efficiency of any split, and the losses.

    n equal cards reach 1 / (1 + (n − 1) f) if a fraction f of the step of one card alone is fixed. A device
    alone neither waits nor communicates.

    Raises:
        ValueError: as `solve`.
    """
    if total < 1:
        raise ValueError(f"efficiency needs a batch of one sample or more, not {total}")
    solo = solo_rates(curves, total)
    quiet = Table(curves, total, minimum, caps, 0.0)
    split = solve(curves, total, minimum, caps, communication)
    seconds = max(step_times(curves, split, communication))
    of_parts = sum(solo)
    whole = max(step_times(curves, Split(tuple(quiet.fill(total).tolist()))))
    real, integer, linked = (total / t / of_parts for t in (quiet.divisible_seconds(total), whole, seconds))
    return Ceiling(
        split=split,
        step_seconds=seconds,
        efficiency=linked,
        fixed=1.0 - real,
        rounding=real - integer,
        communication=integer - linked,
        solo_samples_per_second=solo,
    )


def _per_rank(value: float | Sequence[float], ranks: int) -> Sequence[float]:
    given = [value] * ranks if isinstance(value, (int, float)) else value
    if len(given) != ranks:
        raise ValueError(f"communication must be one number or {ranks}, one a rank, not {len(given)}")
    return given


class Table:
    """All curves as columns, so that an expression evaluates all devices at once."""

    def __init__(
        self,
        curves: Sequence[SpeedCurve],
        total: int,
        minimum: Sequence[int] | None,
        caps: Sequence[int | None] | None,
        communication: float | Sequence[float],
    ) -> None:
        ranks = len(curves)
        if ranks == 0 or total < 0:
            raise ValueError(f"a batch of {total} samples cannot be split over {ranks} devices")
        rows = [
            (
                c.fixed_seconds,
                c.seconds_per_sample,
                c.update_seconds,
                total if c.microbatch_size is None else c.microbatch_size,
                total if c.cap is None else c.cap,
            )
            for c in curves
        ]
        columns: Floats = np.array(rows, dtype=float)
        self.fixed, slopes, update, size, most = columns.T
        self.least = _least(minimum, ranks)
        self.most = np.minimum(np.minimum(most, total).astype(np.int64), _caps(caps, ranks, total))
        _check_limits(total, self.least, self.most)
        self.idle: Floats = update + _per_rank(communication, ranks)
        """Seconds of a device without samples."""
        self.size: Floats = np.clip(size, 1, max(total, 1))
        # Column k has the first sample of slope k, and the seconds until there. A curve with fewer kinks
        # repeats its last slope beyond any batch.
        width = 1 + max(len(c.kinks) for c in curves)
        self.starts = np.zeros((ranks, width))
        self.slopes = np.repeat(slopes[:, None], width, axis=1)
        nowhere = (2**60, 0.0)
        self.until = np.zeros((ranks, width))
        for k in range(1, width):
            kinks = [c.kinks[k - 1] if len(c.kinks) >= k else nowhere for c in curves]
            self.starts[:, k], beyond = np.array(kinks, dtype=float).T
            self.slopes[:, k] = np.where(self.starts[:, k] < 2**60, beyond, self.slopes[:, k - 1])
            piece = self.slopes[:, k - 1] * (self.starts[:, k] - self.starts[:, k - 1])
            self.until[:, k] = self.until[:, k - 1] + piece
        self.full = self._pass(self.size)
        """Seconds of a pass of the microbatch size."""

    def fill(self, total: int) -> Counts:
        """Return the counts that sum to `total` at the lowest level."""
        level = self._level(total, whole=True)
        counts = self.counts(level * (1 - TIE))
        room = self.counts(level * (1 + TIE)) - counts
        # The samples left end at the level. They go to devices with room for several, and of those to the
        # devices with the least additional time, in units of a tie.
        longer = np.rint((level - self.seconds(counts)) / (level * TIE)) if level > 0 else room
        order = np.lexsort((longer, -room))  # stable: of equals the lower rank
        before = np.cumsum(room[order]) - room[order]
        counts[order] += np.clip(total - int(counts.sum()) - before, 0, room[order])
        return counts

    def divisible_seconds(self, total: int) -> float:
        """Return the lowest step time if samples could be divided."""
        return float(np.max(self.seconds(self._divisible(self._level(total, whole=False)))))

    def _level(self, total: int, whole: bool) -> float:
        """Return the shortest time for `total` samples; minimum shares may take longer."""
        ask = self.counts if whole else self._divisible
        enough = total * (1 - FINE)
        low, high = 0.0, float(np.max(self.idle) + np.max(self.full) / len(self.full))
        at_low, at_high = ask(low), ask(high)
        if at_low.sum() >= enough:
            return low
        while at_high.sum() < enough:
            low, high, at_low = high, 2 * high, at_high
            at_high = ask(high)
        while high - low > FINE * high:
            if whole and (at_high - at_low).sum() <= 2 * len(at_low):
                return self._next(self.counts(low), self.counts(high), total)
            middle = (low + high) / 2
            at_middle = ask(middle)
            if at_middle.sum() >= enough:
                high, at_high = middle, at_middle
            else:
                low, at_low = middle, at_middle
        return high

    def _next(self, low: Counts, high: Counts, total: int) -> float:
        """Return the end of the last sample of `total`, among the few that two sets of counts differ in."""
        more = high - low
        rank = np.repeat(np.arange(len(low)), more)
        nth = np.arange(len(rank)) - np.repeat(np.cumsum(more) - more, more)
        last = total - int(low.sum()) - 1
        return float(np.partition(self.seconds(low[rank] + nth + 1, rank), last)[last])

    def counts(self, seconds: float) -> Counts:
        """Return the most samples of each device within so many seconds, within its limits."""
        return np.floor(self._divisible(seconds)).astype(np.int64)

    def _divisible(self, seconds: float) -> Floats:
        """Return the same for divisible samples, including those that end exactly then."""
        left = seconds - self.idle
        passes = np.maximum(np.floor(left / self.full), 0.0)  # number of full passes that fit
        one = left / (passes + 1) - self.fixed  # seconds for the samples of each pass with one more pass
        if self.slopes.shape[1] == 1:
            start, before, slope = 0.0, 0.0, self.slopes[:, 0]
        else:
            at = np.maximum(np.sum(self.until <= one[:, None], axis=1) - 1, 0)
            row = np.arange(len(at))
            start, before, slope = self.starts[row, at], self.until[row, at], self.slopes[row, at]
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = start + (one - before) / slope
        inside = np.where(slope > 0, inside, np.where(one >= before, np.inf, -np.inf))
        counts = np.clip((passes + 1) * inside, passes * self.size, (passes + 1) * self.size)
        limited: Floats = np.clip(counts, self.least, self.most)
        return limited

    def seconds(self, counts: Counts | Floats, rank: Counts | slice = slice(None)) -> Floats:
        """Return the seconds of so many samples of each device (`SpeedCurve.level`).

        Args:
            counts: samples.
            rank: rank of each count; by default all ranks in order.
        """
        idle = self.idle[rank]
        passes: Floats = np.ceil(counts / self.size[rank])
        one = self._pass(counts / np.maximum(passes, 1.0), rank)
        before = np.maximum(passes - 1.0, 0.0) * self.full[rank]
        seconds: Floats = np.where(passes > 0, idle + np.maximum(passes * one, before), idle)
        return seconds

    def _pass(self, samples: Floats, rank: Counts | slice = slice(None)) -> Floats:
        starts, until, slopes = self.starts[rank], self.until[rank], self.slopes[rank]
        at = np.maximum(np.sum(starts < samples[:, None], axis=1) - 1, 0)
        row = np.arange(len(at))
        work = until[row, at] + slopes[row, at] * (samples - starts[row, at])
        seconds: Floats = self.fixed[rank] + work
        return seconds


def _least(minimum: Sequence[int] | None, ranks: int) -> Counts:
    given = [0] * ranks if minimum is None else list(minimum)
    if len(given) != ranks or any(least < 0 for least in given):
        raise ValueError(f"minimum shares must be {ranks} numbers, 0 or more, one a rank, not {given}")
    return np.array(given, dtype=np.int64)


def _caps(caps: Sequence[int | None] | None, ranks: int, total: int) -> Counts:
    given = [None] * ranks if caps is None else list(caps)
    if len(given) != ranks or any(cap is not None and cap < 0 for cap in given):
        raise ValueError(f"caps must be {ranks} numbers, 0 or more, one a rank, not {given}")
    return np.array([total if cap is None else cap for cap in given], dtype=np.int64)


def _check_limits(total: int, least: Counts, most: Counts) -> None:
    if over := [f"rank {r} {least[r]} of at most {most[r]}" for r in np.flatnonzero(least > most)]:
        raise ValueError(f"minimum shares must not exceed caps and batch, but do: {_some(over)}")
    if (needed := int(least.sum())) > total:
        raise ValueError(f"minimum shares must fit the batch of {total} samples, but sum to {needed}")
    if (room := int(most.sum())) < total:
        held = _some([f"rank {r} {n}" for r, n in enumerate(most)])
        raise ValueError(
            f"the devices must hold a batch of {total} samples, but {total - room} find no place: "
            f"together they take at most {room} ({held})"
        )


def _some(parts: list[str]) -> str:
    more = f" and {len(parts) - _LISTED} more" if len(parts) > _LISTED else ""
    return ", ".join(parts[:_LISTED]) + more

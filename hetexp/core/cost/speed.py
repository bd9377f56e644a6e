"""The speed curve of a device: its seconds by samples, for planner, balancer, emulator and report.

A pass, forward and backward of one microbatch, takes `fixed + per_sample · b` seconds; from a kink on a
further sample costs more, or less. A local batch above the microbatch size is split into passes that differ
by at most one sample (`hetexp.data.loader.cut`), so p passes over b samples take p times a pass over b / p.
A step adds the update. Every platform computes the same numbers, by +, −, ×, ÷ and rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hetexp.core.cost.step import Work

BACKWARD_SHARE = 2 / 3
"""Fraction of a pass: backward computes the gradients of inputs and of weights, each as much as forward."""


@dataclass(frozen=True)
class SpeedCurve:
    """Seconds of a device's own work in a step by its local samples, without waits for others."""

    fixed_seconds: float
    """Cost of a pass of any size, such as kernel launches and the copy's latency."""
    seconds_per_sample: float
    """Cost of each sample of a pass, up to the first kink."""
    kinks: tuple[tuple[int, float], ...] = ()
    """(samples of a pass, cost of each sample beyond), in rising order of samples."""
    update_seconds: float = 0.0
    """Optimizer and the host's work between two steps, also of a device without samples."""
    microbatch_size: int | None = None
    """Most samples of a pass; `None`: all samples of a step in one."""
    cap: int | None = None
    """Most samples of a step, by memory or configuration; `None`: no limit."""

    def __post_init__(self) -> None:
        seconds = (self.fixed_seconds, self.seconds_per_sample, self.update_seconds)
        if any(not math.isfinite(s) or s < 0 for s in (*seconds, *(slope for _, slope in self.kinks))):
            raise ValueError(f"a curve's seconds must be finite and not negative: {self}")
        if self.fixed_seconds + self.seconds_per_sample <= 0:
            raise ValueError(f"a pass over one sample must take some time: {self}")
        at = [samples for samples, _ in self.kinks]
        if any(samples < 1 for samples in at) or sorted(set(at)) != at:
            raise ValueError(f"kinks must lie at rising numbers of samples, 1 or more: {self}")
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"the microbatch size must be 1 or more: {self}")
        if self.cap is not None and self.cap < 0:
            raise ValueError(f"the cap must be 0 or more: {self}")

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]], **others: Any) -> SpeedCurve:
        """Return the curve that joins measured points by straight lines.

        If the larger of two neighbours was quicker, that is noise, and both get their mean (pool adjacent
        violators: Ayer et al., 1955). The first and the last line are extended, but not below zero.

        Args:
            points: (samples of a pass, seconds), two or more, at rising numbers of samples.
            others: other fields of the curve.
        """
        sizes = [size for size, _ in points]
        if len(points) < 2 or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError(f"a curve needs two points or more at rising numbers of samples, not {points}")
        seconds = _rising([second for _, second in points])
        slopes = [(seconds[i + 1] - seconds[i]) / (sizes[i + 1] - sizes[i]) for i in range(len(points) - 1)]
        kinks = list(zip(sizes[1:-1], slopes[1:], strict=True))
        fixed, first = seconds[0] - slopes[0] * sizes[0], slopes[0]
        if fixed < 0:  # the line to the first point starts at zero instead
            fixed, first = 0.0, seconds[0] / sizes[0]
            kinks.insert(0, (sizes[0], slopes[0]))
        return cls(fixed, first, tuple(kinks), **others)

    def passes(self, samples: int) -> int:
        """Return the number of passes over so many local samples: 0 for none."""
        size = self.microbatch_size
        return min(samples, 1) if size is None else -(-samples // size)

    def pass_seconds(self, samples: float) -> float:
        """Return the time of one pass over so many samples, above 0."""
        seconds, start, slope = self.fixed_seconds, 0, self.seconds_per_sample
        for at, beyond in self.kinks:
            if samples <= at:
                break
            seconds += slope * (at - start)
            start, slope = at, beyond
        return seconds + slope * (samples - start)

    def compute_seconds(self, samples: int) -> float:
        """Return the time of all passes over so many local samples, without the update."""
        passes = self.passes(samples)
        return passes * self.pass_seconds(samples / passes) if passes else 0.0

    def seconds(self, samples: int) -> float:
        """Return the device's own time of a step with so many local samples.

        It rises with the samples, with one exception: if a kink makes large passes expensive, one more pass
        may make the step shorter.
        """
        return self.update_seconds + self.compute_seconds(samples)

    def level(self, samples: int) -> float:
        """Return the largest `seconds` of any batch up to this one, usually its own `seconds`."""
        full = max(self.passes(samples) - 1, 0)
        before = full * self.pass_seconds(self.microbatch_size or 1) if full else 0.0
        return self.update_seconds + max(self.compute_seconds(samples), before)

    def samples_within(self, seconds: float) -> int | None:
        """Return the most samples b such that no step of up to b samples takes longer, at most `cap`.

        `None` stands for no limit, with a flat curve without cap. The result is also 0 if the update alone
        takes longer.
        """
        if self.level(0) > seconds or self.cap == 0:
            return 0
        high = 1
        while self.level(high) <= seconds:
            if self.cap is not None and high >= self.cap:
                return self.cap
            if high > 2**53:
                return None
            high *= 2
        low = high // 2  # fits (0 does), and `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.level(middle) <= seconds else (low, middle)
        return low if self.cap is None else min(low, self.cap)

    def scaled(self, factor: float) -> SpeedCurve:
        """Return the curve of a device that takes `factor` times as long for everything."""
        return replace(
            self,
            fixed_seconds=self.fixed_seconds * factor,
            seconds_per_sample=self.seconds_per_sample * factor,
            kinks=tuple((at, slope * factor) for at, slope in self.kinks),
            update_seconds=self.update_seconds * factor,
        )

    def work(self, samples: int, backward_share: float = BACKWARD_SHARE) -> Work:
        """Return the step as input of the cost model (`hetexp.core.cost.step.step_seconds`)."""
        passes = self.passes(samples)
        seconds = self.compute_seconds(samples) / passes if passes else 0.0
        forward, backward = seconds * (1 - backward_share), seconds * backward_share
        return Work((forward,) * passes, (backward,) * passes, self.update_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON, from which `from_dict` makes the same curve to the last bit."""
        return {**asdict(self), "kinks": [list(kink) for kink in self.kinks]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SpeedCurve:
        """Return the curve from the result of `to_dict`.

        Raises:
            ValueError: keys are unknown or missing, or a value is out of range.
        """
        names = {field.name for field in fields(cls)}
        if set(stored) != names:
            raise ValueError(f"a stored curve must have the keys {sorted(names)}, not {sorted(stored)}")
        kinks = tuple((int(at), float(slope)) for at, slope in stored["kinks"])
        return cls(**{**stored, "kinks": kinks})


def _rising(values: Sequence[float]) -> list[float]:
    """Return the rising sequence nearest to `values` by least squares."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] * count > total * blocks[-1][1]:
            before, many = blocks.pop()
            total, count = total + before, count + many
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]

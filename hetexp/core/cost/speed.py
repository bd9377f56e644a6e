"""How long one device works on so many samples: the curve that planner, balancer, emulator and report share.

A pass, forward and backward of one microbatch, takes `fixed + per_sample · b` seconds; at a kink a further
sample begins to cost more, or less. A local batch above the microbatch size is cut into passes that differ
by at most one sample (`hetexp.data.loader.cut`), so p passes over b samples take p times a pass over b / p.
A step adds the update. Only +, −, ×, ÷ and rounding are used: every platform computes the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hetexp.core.cost.step import Work

BACKWARD_SHARE = 2 / 3
"""Of a pass: backward computes the gradients of inputs and of weights, each as much work as forward."""


@dataclass(frozen=True)
class SpeedCurve:
    """Seconds of a device's own work in a step, by its local samples; waiting for others is no part of it."""

    fixed_seconds: float
    """What each pass takes whatever its size: kernel launches, the copy's latency."""
    seconds_per_sample: float
    """What a sample adds to a pass, up to the first kink."""
    kinks: tuple[tuple[int, float], ...] = ()
    """(samples of a pass, seconds that each sample beyond adds), in rising order of samples."""
    update_seconds: float = 0.0
    """Optimizer, and what the host does between two steps; also paid by a device without samples."""
    microbatch_size: int | None = None
    """Most samples of a pass; `None`: all samples of a step in one."""
    cap: int | None = None
    """Most samples a step, where memory or a person sets a limit; `None`: no limit."""

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

        Neighbours of which the larger was quicker get the mean of both (pool adjacent violators: Ayer et
        al., 1955): noise, since a device that has time for more samples has time for fewer. Beyond the last
        point the last line goes on, and before the first point the first, but not below zero.

        Args:
            points: (samples of a pass, seconds), two or more, at rising numbers of samples.
            others: fields of the curve besides.
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
        """Return the time of all passes over so many local samples, the update left out."""
        passes = self.passes(samples)
        return passes * self.pass_seconds(samples / passes) if passes else 0.0

    def seconds(self, samples: int) -> float:
        """Return the device's own time of a step with so many local samples.

        It rises with the samples, with one exception: where a kink makes large passes so dear that one
        more pass pays, the step gets quicker at the sample that begins it. `efficient_microbatch_size`
        avoids this.
        """
        return self.update_seconds + self.compute_seconds(samples)

    def level(self, samples: int) -> float:
        """Return the largest `seconds` of any batch up to this one; the same as `seconds` where it rises."""
        full = max(self.passes(samples) - 1, 0)
        before = full * self.pass_seconds(self.microbatch_size or 1) if full else 0.0
        return self.update_seconds + max(self.compute_seconds(samples), before)

    def samples_within(self, seconds: float) -> int | None:
        """Return the most samples b such that no step of up to b samples takes longer, at most `cap`.

        `None` stands for no limit: a flat curve without cap. 0 also where not even the update fits.
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

    def efficient_microbatch_size(self, most: int) -> int:
        """Return the size up to `most` at which a pass takes least a sample; the larger one of equals.

        With it as microbatch size, `seconds` never falls.
        """
        ends = [1, *(at for at, _ in self.kinks if 1 < at < most), most]  # lines have their least at an end
        best = ends[-1]
        for size in reversed(ends):
            # Within rounding, the larger size: fewer passes.
            if self.pass_seconds(size) * best < self.pass_seconds(best) * size * (1 - 1e-12):
                best = size
        return best

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
        """Return the step as the cost model takes it (`hetexp.core.cost.step.step_seconds`)."""
        passes = self.passes(samples)
        seconds = self.compute_seconds(samples) / passes if passes else 0.0
        forward, backward = seconds * (1 - backward_share), seconds * backward_share
        return Work((forward,) * passes, (backward,) * passes, self.update_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold; `from_dict` gives the same curve back, to the last bit."""
        return {**asdict(self), "kinks": [list(kink) for kink in self.kinks]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SpeedCurve:
        """Return the curve that `to_dict` stored.

        Raises:
            ValueError: it is none: keys are unknown or missing, or a value cannot be one of a curve.
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

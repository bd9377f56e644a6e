"""Running estimates of a positive quantity that should hold still, such as a device's seconds a sample.

Only +, −, ×, ÷ and square roots are used, which every platform rounds alike: ranks that are given the same
values hold the same estimates, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SMALLEST_SPREAD = 0.01
"""Relative: what jitters less now may yet jitter so much."""
ASSUMED_SPREAD = 0.05
"""Relative standard deviation of single values before any has been seen."""
ASSUMED_VALUES = 4
"""It counts as much as so many values."""


@dataclass
class SpeedAverage:
    """A bias-corrected exponential moving average that single outliers hardly move.

    A corrected average of seconds a sample is hivemind's idea
    (its `hivemind/utils/performance_ema.py`); corrected means that the first value counts in full, and n
    values like n of a mean while they are few. Added here: a value further off than `clip` standard
    deviations counts as one just there (Huber), and the average knows its own standard error.
    """

    alpha: float = 0.05
    """Weight of the newest of many values; the average looks back over about 2 / alpha of them."""
    assumed_spread: float = ASSUMED_SPREAD
    """Relative standard deviation of single values, until enough have been seen."""
    clip: float = 3.0
    """In standard deviations."""
    value: float = 0.0
    """The average; 0 before the first value."""
    num_values: int = 0
    """Since the beginning or the last restart."""
    owed: float = 1.0
    """(1 − alpha)^n: the part of the weight that no value has taken yet."""
    variance: float = 0.0
    """Relative, of single values around the average of those before."""
    variance_owed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or not self.assumed_spread > 0 or not self.clip > 0:
            raise ValueError(f"alpha lies between 0 and 1, and spread and clip above 0: {self}")

    @property
    def spread(self) -> float:
        """Relative standard deviation of single values, as assumed until enough have been seen."""
        seen = 1.0 - self.variance_owed
        assumed = ASSUMED_VALUES * self.alpha * self.variance_owed  # fades as values come in
        both = self.variance * seen + self.assumed_spread * self.assumed_spread * assumed
        return max(math.sqrt(both / (seen + assumed)), SMALLEST_SPREAD)

    @property
    def variance_values(self) -> float:
        """Number of values that the variance is worth: so many at first, later about 1 / alpha."""
        return (1.0 - self.variance_owed) / self.alpha

    @property
    def effective_values(self) -> float:
        """Number of values whose plain mean would be as sure; at most 2 / alpha − 1."""
        return (1 - self.owed) * (2 - self.alpha) / ((1 + self.owed) * self.alpha)

    @property
    def standard_error(self) -> float:
        """Relative standard deviation of the average; infinite before the first value."""
        return self.spread / math.sqrt(self.effective_values) if self.num_values else math.inf

    def deviation(self, value: float) -> float:
        """Return how many standard deviations a next value would be off, at most `clip` either way."""
        if not self.num_values:
            return 0.0
        expected = self.spread * math.sqrt(1 + 1 / self.effective_values)
        return min(max((value / self.value - 1) / expected, -self.clip), self.clip)

    def update(self, value: float) -> float:
        """Take in a value; return the average.

        Raises:
            ValueError: the value is not a positive number.
        """
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"an average of speeds takes positive numbers, not {value}")
        if self.num_values:
            off = self.deviation(value) * self.spread
            self.variance_owed *= 1 - self.alpha
            self.variance += self.alpha / (1 - self.variance_owed) * (off * off - self.variance)
            value = self.value * (1 + off * math.sqrt(1 + 1 / self.effective_values))
        self.owed *= 1 - self.alpha
        self.value += self.alpha / (1 - self.owed) * (value - self.value)
        self.num_values += 1
        return self.value

    def restart(self, values: Sequence[float] = ()) -> None:
        """Forget everything and begin with these values, each in full."""
        self.value, self.num_values, self.owed = 0.0, 0, 1.0
        self.variance, self.variance_owed = 0.0, 1.0
        middle = sorted(values)[len(values) // 2] if values else 0.0
        for value in (
            middle,
            *values,
        ):  # the middle one first, so that none of the others is cut by a stray one
            self.update(value)
        self.forget(len(values))

    def forget(self, num_values: int) -> None:
        """Keep the average, but be no surer of it than of that of so many values."""
        owed = 1.0
        for _ in range(min(num_values, self.num_values)):
            owed *= 1 - self.alpha
        self.owed, self.num_values = max(self.owed, owed), min(self.num_values, num_values)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold; `from_dict` goes on from it exactly."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SpeedAverage:
        """Return the average that `to_dict` stored."""
        return cls(**stored)


@dataclass
class ShiftDetector:
    """Tells a lasting change from noise: cumulative sums of deviations, one upwards and one downwards.

    Page, Continuous Inspection Schemes, Biometrika 1954. Deviations are in standard deviations and limited
    (`SpeedAverage.deviation`): at a limit of 3, one outlier adds 2 of the 5.5 that it takes, so a change of
    any size needs three values, and normal noise raises a false alarm in about a hundred thousand.
    """

    allowance: float = 1.0
    """What each value may be off without adding to a sum."""
    threshold: float = 5.5
    """Sum at which a change is certain."""
    up: float = 0.0
    down: float = 0.0
    num_up: int = 0
    """Values since the sum upwards left zero: those after the change."""
    num_down: int = 0

    def add(self, deviation: float) -> int:
        """Take in a deviation; return how many of the last values belong to a lasting change, 0 for none."""
        self.up = max(self.up + deviation - self.allowance, 0.0)
        self.down = max(self.down - deviation - self.allowance, 0.0)
        self.num_up = self.num_up + 1 if self.up else 0
        self.num_down = self.num_down + 1 if self.down else 0
        if self.up > self.threshold:
            return self.num_up
        return self.num_down if self.down > self.threshold else 0

    @property
    def suspects_less(self) -> bool:
        """Whether the last values hint at a lasting change downwards: one far value does."""
        return self.down > self.threshold / 3

    def reset(self) -> None:
        """Forget all deviations."""
        self.up = self.down = 0.0
        self.num_up = self.num_down = 0

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ShiftDetector:
        """Return the detector that `to_dict` stored."""
        return cls(**stored)

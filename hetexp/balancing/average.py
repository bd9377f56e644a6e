"""Running estimates of a positive quantity that should stay constant, such as a device's seconds per sample.

Only +, −, ×, ÷ and square roots are used, which every platform rounds alike. So ranks with the same values
have the same estimates, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SMALLEST_SPREAD = 0.01
"""Least relative standard deviation, because less noise so far may be chance."""
ASSUMED_SPREAD = 0.05
"""Relative standard deviation of single values before the first one."""
ASSUMED_VALUES = 4
"""Number of values whose weight the assumption has."""


@dataclass
class SpeedAverage:
    """A bias-corrected exponential moving average that single outliers hardly move.

    The corrected average of seconds per sample is from hivemind (`hivemind/utils/performance_ema.py`).
    Corrected means that few values count as in a plain mean. In addition, a value more than `clip` standard
    deviations off is clipped (Huber), and the average has a standard error.
    """

    alpha: float = 0.05
    """Weight of the newest of many values; the average covers about the last 2 / alpha values."""
    assumed_spread: float = ASSUMED_SPREAD
    """Relative standard deviation of single values, until there are enough values."""
    clip: float = 3.0
    """Largest deviation that counts, in standard deviations."""
    value: float = 0.0
    """The average; 0 before the first value."""
    num_values: int = 0
    """Number of values since the beginning or the last restart."""
    owed: float = 1.0
    """(1 − alpha)^n: the part of the weight that no value has yet."""
    variance: float = 0.0
    """Relative variance of single values around the previous average."""
    variance_owed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or not self.assumed_spread > 0 or not self.clip > 0:
            raise ValueError(f"alpha lies between 0 and 1, and spread and clip above 0: {self}")

    @property
    def spread(self) -> float:
        """Relative standard deviation of single values, at first as assumed."""
        seen = 1.0 - self.variance_owed
        assumed = ASSUMED_VALUES * self.alpha * self.variance_owed  # fades with the number of values
        both = self.variance * seen + self.assumed_spread * self.assumed_spread * assumed
        return max(math.sqrt(both / (seen + assumed)), SMALLEST_SPREAD)

    @property
    def variance_values(self) -> float:
        """Effective number of values of the variance: all at first, later about 1 / alpha."""
        return (1.0 - self.variance_owed) / self.alpha

    @property
    def effective_values(self) -> float:
        """Number of values whose plain mean has the same standard error; at most 2 / alpha − 1."""
        return (1 - self.owed) * (2 - self.alpha) / ((1 + self.owed) * self.alpha)

    @property
    def standard_error(self) -> float:
        """Relative standard deviation of the average; infinite before the first value."""
        return self.spread / math.sqrt(self.effective_values) if self.num_values else math.inf

    def deviation(self, value: float) -> float:
        """Return the deviation of a next value in standard deviations, from −`clip` to `clip`."""
        if not self.num_values:
            return 0.0
        expected = self.spread * math.sqrt(1 + 1 / self.effective_values)
        return min(max((value / self.value - 1) / expected, -self.clip), self.clip)

    def update(self, value: float) -> float:
        """Add a value; return the average.

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

    def restart(self, values: Sequence[float]) -> None:
        """Forget everything and start from these values, one or more, each in full."""
        self.value, self.num_values, self.owed = 0.0, 0, 1.0
        self.variance, self.variance_owed = 0.0, 1.0
        # The median first, so that an outlier at the start does not clip the others.
        for value in (sorted(values)[len(values) // 2], *values):
            self.update(value)
        self.forget(len(values))

    def forget(self, num_values: int) -> None:
        """Keep the average, but with the standard error of so few values."""
        owed = 1.0
        for _ in range(min(num_values, self.num_values)):
            owed *= 1 - self.alpha
        self.owed, self.num_values = max(self.owed, owed), min(self.num_values, num_values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON, from which `from_dict` goes on exactly."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SpeedAverage:
        """Return the average from the result of `to_dict`."""
        return cls(**stored)


@dataclass
class ShiftDetector:
    """Detects a lasting change in noise by cumulative sums of deviations, upwards and downwards.

    Page, Continuous Inspection Schemes, Biometrika 1954. Deviations are in standard deviations and limited
    (`SpeedAverage.deviation`). At a limit of 3, one outlier adds 2 to the sum, and the threshold is 5.5. So a
    change of any size needs three values, and normal noise raises one false alarm in about 100,000 values.
    """

    allowance: float = 1.0
    """Deviation that adds nothing to a sum."""
    threshold: float = 5.5
    """Sum at which a change is certain."""
    up: float = 0.0
    down: float = 0.0
    num_up: int = 0
    """Number of values since the sum upwards left zero, which are those after the change."""
    num_down: int = 0

    def add(self, deviation: float) -> int:
        """Add a deviation; return how many of the last values belong to a lasting change, 0 for none."""
        self.up = max(self.up + deviation - self.allowance, 0.0)
        self.down = max(self.down - deviation - self.allowance, 0.0)
        self.num_up = self.num_up + 1 if self.up else 0
        self.num_down = self.num_down + 1 if self.down else 0
        if self.up > self.threshold:
            return self.num_up
        return self.num_down if self.down > self.threshold else 0

    @property
    def suspects_less(self) -> bool:
        """Whether the last values may be a lasting change downwards; one outlier is enough."""
        return self.down > self.threshold / 3

    def reset(self) -> None:
        """Forget all deviations."""
        self.up = self.down = 0.0
        self.num_up = self.num_down = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ShiftDetector:
        """Return the detector from the result of `to_dict`."""
        return cls(**stored)

"""The estimate of a device's speed while it trains: its curve × a measured factor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hetexp.balancing.average import ShiftDetector, SpeedAverage
from hetexp.core.cost.speed import SpeedCurve

KEPT = 12
"""Number of last factors for a restart of the average; the average itself follows a slower change."""
SAME_SIZE = 0.1
"""Largest relative change of the local samples for which earlier factors stay valid."""
KNOWN = 2
"""Number of values of a factor before it decides a split."""
REFITS = 8
"""Number of values at a new size that may still change the curve's shape."""
LIKELY_FIXED = 0.3
"""Standard deviation of the fixed part of a pass in an assumed curve, as a fraction of the pass."""
MOST_FIXED = 0.9
"""Largest credible fixed part of a pass, as a fraction."""


@dataclass(frozen=True)
class Anchor:
    """A device's time at its previous number of local samples."""

    samples: int
    seconds: float
    error: float
    """Relative standard error of the seconds."""
    fixed: float
    """Fixed part of a pass at the present size, as a fraction, by the curve before the change."""


@dataclass
class DeviceEstimate:
    """The factor of one device: measured ÷ expected compute seconds, step by step."""

    curve: SpeedCurve
    """From a calibration or the catalogue."""
    average: SpeedAverage = field(default_factory=SpeedAverage)
    shifts: ShiftDetector = field(default_factory=ShiftDetector)
    recent: list[float] = field(default_factory=list)
    size: int = 0
    """Local samples of the average."""
    settled: float | None = None
    """Last average without signs of a change."""
    before: float | None = None
    """Last such average before the last lasting change."""
    best: float | None = None
    """Lowest average so far, at the device's best speed."""
    assumed: bool = False
    """Whether the curve was never measured, so that two measured sizes may change its shape."""
    anchor: Anchor | None = None

    @property
    def known(self) -> bool:
        return self.average.num_values >= KNOWN

    def observe(self, seconds: float, samples: int, same_size: bool = False) -> bool:
        """Add a step's compute seconds; return whether they complete a lasting change.

        Args:
            seconds: forward and backward of all local samples, without the update.
            samples: local samples, above 0.
            same_size: whether to treat another size like the usual one, as in a probe.
        """
        if not same_size and abs(samples - self.size) > SAME_SIZE * self.size:
            if self.size:
                self._drop_anchor(samples)
                self._forget()
            self.size = samples
        factor = seconds / self.curve.compute_seconds(samples)
        self.recent = [*self.recent[1 - KEPT :], factor]
        since = self.shifts.add(self.average.deviation(factor))
        if not since:
            self.average.update(factor)
        else:
            self.before = self.settled
            self.average.restart(self.recent[-since:])
            self.shifts.reset()
            self.anchor = None  # it is from another speed
        if self.anchor is not None and not same_size and KNOWN <= self.average.num_values <= REFITS:
            self._refit(self.anchor)
        if max(self.shifts.up, self.shifts.down) == 0:
            self.settled = self.average.value
            if self.average.num_values > KNOWN:
                self.best = min(self.best or self.settled, self.settled)
        return since > 0

    def _drop_anchor(self, samples: int) -> None:
        """Keep the time at the previous size, from which the curve's fixed part can be estimated."""
        self.anchor = None
        if self.assumed and self.known and self.curve.microbatch_size is None:
            seconds = self.curve.compute_seconds(self.size) * self.average.value
            fixed = self.curve.fixed_seconds / self.curve.compute_seconds(samples)
            self.anchor = Anchor(self.size, seconds, self.average.standard_error, fixed)

    def _refit(self, anchor: Anchor) -> None:
        """Set the curve's fixed part by the times at two sizes, weighted by their errors.

        With times t₀, t of b₀, b samples the fixed part of t is φ = (t₀/t − b₀/b) / (1 − b₀/b). The previous
        curve counts as a measurement with a standard deviation of `LIKELY_FIXED`.
        """
        seconds = self.curve.compute_seconds(self.size) * self.average.value
        times, sizes = anchor.seconds / seconds, anchor.samples / self.size
        error = self.average.standard_error
        deviation = times * math.sqrt(anchor.error * anchor.error + error * error) / abs(1.0 - sizes)
        measured, before = 1.0 / (deviation * deviation), 1.0 / (LIKELY_FIXED * LIKELY_FIXED)
        fixed = (measured * (times - sizes) / (1.0 - sizes) + before * anchor.fixed) / (measured + before)
        fixed = min(max(fixed, 0.0), MOST_FIXED)
        self.curve = replace(
            self.curve,
            fixed_seconds=fixed * seconds,
            seconds_per_sample=(1.0 - fixed) * seconds / self.size,
            kinks=(),
        )
        self._rebase(self.average.value)

    def _rebase(self, unit: float) -> None:
        """Divide all factors by `unit`, after the curve has become `unit` times as long at this size."""
        self.average.value /= unit
        self.recent = [factor / unit for factor in self.recent]
        self.settled = self.settled / unit if self.settled is not None else None
        self.before = self.before / unit if self.before is not None else None
        self.best = self.best / unit if self.best is not None else None

    def _forget(self) -> None:
        # At another size the curve may be wrong by another factor: earlier values count as one.
        self.average.forget(1)
        self.shifts.reset()
        self.recent = []

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON, from which `from_dict` goes on exactly."""
        return {
            **vars(self),
            "curve": self.curve.to_dict(),
            "average": self.average.to_dict(),
            "shifts": self.shifts.to_dict(),
            "recent": list(self.recent),
            "anchor": None if self.anchor is None else asdict(self.anchor),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DeviceEstimate:
        """Return the estimate from the result of `to_dict`."""
        parts = {
            "curve": SpeedCurve.from_dict(stored["curve"]),
            "average": SpeedAverage.from_dict(stored["average"]),
            "shifts": ShiftDetector.from_dict(stored["shifts"]),
            "recent": list(stored["recent"]),
            "anchor": None if stored["anchor"] is None else Anchor(**stored["anchor"]),
        }
        return cls(**{**stored, **parts})

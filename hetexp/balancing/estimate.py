"""What is known of one device's speed while it trains: its curve, and how much slower it is than that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hetexp.balancing.average import ShiftDetector, SpeedAverage
from hetexp.core.cost.speed import SpeedCurve

KEPT = 12
"""Factors kept to start over from; a slower change than this is followed by the average itself."""
SAME_SIZE = 0.1
"""Relative change of the local samples up to which a factor measured before still says the same."""
KNOWN = 2
"""Values that a factor needs before a split is made of it."""
REFITS = 8
"""Values at a new size up to which they may still change the curve's shape."""
LIKELY_FIXED = 0.3
"""Standard deviation of the fixed part of a pass around what an assumed curve says, as a fraction of it."""
MOST_FIXED = 0.9
"""Fixed part of a pass, as a fraction, beyond which two sizes are not believed."""


@dataclass(frozen=True)
class Anchor:
    """What a device took at the size before the present one."""

    samples: int
    seconds: float
    error: float
    """Relative standard error of the seconds."""
    fixed: float
    """Fixed part of a pass at the present size, as a fraction, as the curve had it before the change."""


@dataclass
class DeviceEstimate:
    """Measured ÷ expected compute seconds of one device, step by step."""

    curve: SpeedCurve
    """As calibrated or as the catalogue says."""
    average: SpeedAverage = field(default_factory=SpeedAverage)
    shifts: ShiftDetector = field(default_factory=ShiftDetector)
    recent: list[float] = field(default_factory=list)
    size: int = 0
    """Local samples that the average is about."""
    settled: float | None = None
    """Average when it was last not in doubt."""
    before: float | None = None
    """The same before the last lasting change."""
    best: float | None = None
    """Least average ever: what the device can do."""
    assumed: bool = False
    """Whether the curve was never measured, so that two sizes tell more of its shape than it does."""
    anchor: Anchor | None = None

    @property
    def known(self) -> bool:
        return self.average.num_values >= KNOWN

    def observe(self, seconds: float, samples: int, same_size: bool = False) -> bool:
        """Take in a step's compute seconds; return whether they complete a lasting change.

        Args:
            seconds: forward and backward of all local samples, without the update.
            samples: local ones, above 0.
            same_size: whether to take the size for the usual one, as in a probe.
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
            self.anchor = None  # it was another speed
        if self.anchor is not None and not same_size and KNOWN <= self.average.num_values <= REFITS:
            self._refit(self.anchor)
        if max(self.shifts.up, self.shifts.down) == 0:
            self.settled = self.average.value
            if self.average.num_values > KNOWN:
                self.best = min(self.best or self.settled, self.settled)
        return since > 0

    def _drop_anchor(self, samples: int) -> None:
        """Keep what was found at the size that is left, to tell the curve's fixed part by it."""
        self.anchor = None
        if self.assumed and self.known and self.curve.microbatch_size is None:
            seconds = self.curve.compute_seconds(self.size) * self.average.value
            fixed = self.curve.fixed_seconds / self.curve.compute_seconds(samples)
            self.anchor = Anchor(self.size, seconds, self.average.standard_error, fixed)

    def _refit(self, anchor: Anchor) -> None:
        """Give the curve the fixed part that explains both sizes, as far as their errors let it be known.

        With times t₀, t of b₀, b samples the fixed part of t is φ = (t₀/t − b₀/b) / (1 − b₀/b). What the
        curve said before counts as a measurement, too, with a standard deviation of `LIKELY_FIXED`.
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
        """Express all factors by a curve that takes `unit` times as long at the present size."""
        self.average.value /= unit
        self.recent = [factor / unit for factor in self.recent]
        self.settled = self.settled / unit if self.settled is not None else None
        self.before = self.before / unit if self.before is not None else None
        self.best = self.best / unit if self.best is not None else None

    def _forget(self) -> None:
        # With other local samples the curve may be wrong by another factor: what was found counts once.
        self.average.forget(1)
        self.shifts.reset()
        self.recent = []

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold; `from_dict` goes on from it exactly."""
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
        """Return the estimate that `to_dict` stored."""
        parts = {
            "curve": SpeedCurve.from_dict(stored["curve"]),
            "average": SpeedAverage.from_dict(stored["average"]),
            "shifts": ShiftDetector.from_dict(stored["shifts"]),
            "recent": list(stored["recent"]),
            "anchor": None if stored["anchor"] is None else Anchor(**stored["anchor"]),
        }
        return cls(**{**stored, **parts})

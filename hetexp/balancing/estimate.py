"""What is known of one device's speed while it trains: its curve, and how much slower it is than that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetexp.balancing.average import ShiftDetector, SpeedAverage
from hetexp.core.speed import SpeedCurve

KEPT = 12
"""Factors kept to start anew from; a slower change than this is followed by the average itself."""
SAME_SIZE = 0.1
"""Relative change of the local samples up to which a factor measured before still says the same."""
KNOWN = 2
"""Values that a factor needs before a split is made of it."""


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
        if max(self.shifts.up, self.shifts.down) == 0:
            self.settled = self.average.value
            if self.average.num_values > KNOWN:
                self.best = min(self.best or self.settled, self.settled)
        return since > 0

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
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DeviceEstimate:
        """Return the estimate that `to_dict` stored."""
        parts = {
            "curve": SpeedCurve.from_dict(stored["curve"]),
            "average": SpeedAverage.from_dict(stored["average"]),
            "shifts": ShiftDetector.from_dict(stored["shifts"]),
            "recent": list(stored["recent"]),
        }
        return cls(**{**stored, **parts})

"""Attributes the lost speed: from the sum of each device's speed alone to the speed of all together.

Each loss is the difference of two efficiencies, so that the losses and the efficiency sum to 1:

    1 ─ fixed costs ─▶ split without rounding ─ rounding ─▶ best split ─ imbalance ─▶ this split
      ─ communication ─▶ as predicted ─ data, other ─▶ as measured

`other` is the rest, including the devices' own fixed costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetexp.balancing.solver import ceiling, step_times
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.split import Split


@dataclass(frozen=True)
class Account:
    """The losses of one run; throughputs are in samples per second of the curves' clock."""

    solo_samples_per_second: tuple[float, ...]
    """Each device alone with the whole global batch."""
    ceiling: float
    """Best efficiency with fixed costs, rounding and the exchange."""
    efficiency: float
    lost_to: dict[str, float]
    """imbalance, communication, rounding, data, other; together 1 − efficiency."""


def account(
    curves: Sequence[SpeedCurve],
    counts: Sequence[int],
    predicted_seconds: float,
    best_seconds: float,
    measured_seconds: float,
    data_seconds: float = 0.0,
) -> Account:
    """Return the losses of a step of a full global batch.

    Args:
        curves: of each device, as measured before the run.
        counts: samples of each device.
        predicted_seconds: of this split's step, including the exchange.
        best_seconds: of the best split's step, likewise.
        measured_seconds: of a step of the run.
        data_seconds: of its wait for samples.
    """
    total = sum(counts)
    best = ceiling(curves, total)
    parts = sum(best.solo_samples_per_second)

    def efficiency(seconds: float) -> float:
        return total / seconds / parts

    quiet = max(step_times(curves, Split(tuple(counts))))
    whole = efficiency(max(step_times(curves, best.split)))
    measured = efficiency(measured_seconds)
    lost = {
        "imbalance": whole - efficiency(quiet),
        "communication": efficiency(quiet) - efficiency(predicted_seconds),
        "rounding": best.rounding,
        "data": measured * data_seconds / measured_seconds,
    }
    return Account(
        solo_samples_per_second=best.solo_samples_per_second,
        ceiling=efficiency(best_seconds),
        efficiency=measured,
        lost_to={**lost, "other": 1.0 - measured - sum(lost.values())},
    )

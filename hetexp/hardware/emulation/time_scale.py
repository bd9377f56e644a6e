"""The smallest time scale with which emulated devices keep their pace."""

from __future__ import annotations

from collections.abc import Sequence

ACCEPTED_LATE = 0.003
"""Share of the modelled time that phases may be late, so that a short one, as a small model's update, does
not slow down all others."""


def least_scale(kinds: Sequence[tuple[float, float]]) -> float:
    """Return the least factor of the modelled times by which the work is late by `ACCEPTED_LATE` at most.

    Args:
        kinds: seconds of work and modelled seconds, which are above zero.
    """
    modelled = sum(allowed for _, allowed in kinds)

    def late(scale: float) -> float:
        return sum(max(0.0, work - scale * allowed) for work, allowed in kinds)

    low, high = 0.0, max((work / allowed for work, allowed in kinds), default=0.0)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if late(middle) <= ACCEPTED_LATE * middle * modelled else (middle, high)
    return high

"""Integer shares of a batch, by pure functions with the same result on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Split:
    """How many samples of one global batch each rank takes; rank r takes `bounds(r)`."""

    counts: tuple[int, ...]
    """Samples a rank, in rank order; zero is allowed."""

    @property
    def total(self) -> int:
        return sum(self.counts)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return `[start, end)` of the rank's slice in the global batch."""
        ends = list(accumulate(self.counts))
        return ends[rank] - self.counts[rank], ends[rank]


def normalise(weights: Sequence[float]) -> tuple[float, ...]:
    """Scale non-negative weights so that they sum to 1.

    Raises:
        ValueError: a weight is negative or not finite, or none is above zero.
    """
    if any(not math.isfinite(w) or w < 0 for w in weights):
        raise ValueError(f"weights must be finite and not negative, but are {list(weights)}")
    # Scaled by the largest first: the sum of weights near the end of the float range would overflow.
    largest = max(weights, default=0.0)
    if largest <= 0:
        raise ValueError(f"at least one weight must be above zero, but they are {list(weights)}")
    scaled = [w / largest for w in weights]
    total = math.fsum(scaled)
    return tuple(w / total for w in scaled)


def apportion(total: int, shares: Sequence[float]) -> Split:
    """Split `total` samples in proportion to `shares` by the largest-remainder method (Hamilton's).

    Every count is the floor or the ceiling of its exact quota, and the counts sum to `total`. Ties go
    to the lower rank, so that every rank computes the same answer.

    Args:
        total: samples of the batch, 0 or more.
        shares: non-negative fractions, one a rank; they need not sum to 1.
    """
    quotas = [total * share for share in normalise(shares)]
    counts = [math.floor(quota) for quota in quotas]
    left = total - sum(counts)
    by_remainder = sorted(range(len(quotas)), key=lambda r: (counts[r] - quotas[r], r))
    # A rank with a share of zero never gets a left-over sample.
    takers = [r for r in by_remainder if shares[r] > 0]
    for i in range(left):
        counts[takers[i % len(takers)]] += 1
    return Split(tuple(counts))

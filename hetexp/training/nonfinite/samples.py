"""A rank's report of the samples that made a step non-finite, as numbers for the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_NAMED = 8
"""Most samples of each rank that a message names."""
WIDTH = 3 + MOST_NAMED
"""Numbers of a `NonFiniteSamples` in a message."""
NOT_FOUND, ALONE, TOGETHER = range(3)
"""Kinds of a rank's report: no samples, samples that are not finite alone, or samples of one pass."""


@dataclass
class NonFiniteSamples:
    """The samples on one rank that make its part of a step non-finite."""

    what: int = NOT_FOUND
    samples: list[int] = field(default_factory=list)
    """Places in the training data, at most `MOST_NAMED`."""
    count: int = 0
    """Number of such samples; a lower bound if the search ended early."""
    parameter: int = -1
    """Number of the first parameter whose gradient on this rank is not finite; -1: none, or not checked."""

    def to_row(self) -> list[float]:
        """Return the `WIDTH` numbers of this rank's row in a table of all ranks."""
        padded = self.samples + [0] * (MOST_NAMED - len(self.samples))
        return [self.what, self.count, self.parameter, *padded]

    @classmethod
    def from_row(cls, row: list[float]) -> NonFiniteSamples:
        """Read what `to_row` returned."""
        what, count, parameter, *padded = map(int, row)
        return cls(what, padded[: min(count, MOST_NAMED)], count, parameter)

    def words(self) -> str:
        """Return the samples' names for a message."""
        more = "" if self.count <= len(self.samples) else " and more"
        listed = ", ".join(map(str, self.samples)) + more
        return f"training sample{'s' if self.count > 1 else ''} {listed}"

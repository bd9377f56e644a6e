"""What a rank found out about a step of its own that is not finite, and how the others learn of it."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_NAMED = 8
"""Samples that a message names at most, of each rank."""
WIDTH = 3 + MOST_NAMED
"""Numbers that `NonFiniteSamples` travels as."""
NOT_FOUND, ALONE, TOGETHER = range(3)
"""What was found on a rank: nothing, samples that are not finite alone, or only as one pass."""


@dataclass
class NonFiniteSamples:
    """What one rank found out about its own part of a step."""

    what: int = NOT_FOUND
    samples: list[int] = field(default_factory=list)
    """Places in the training data, at most `MOST_NAMED`."""
    count: int = 0
    """How many there are in all; of samples that are found one by one, at least so many."""
    parameter: int = -1
    """Number of the first parameter whose own gradient is not finite, where that was asked; -1: none."""

    def to_row(self) -> list[float]:
        """Return numbers for all ranks to add up, each rank in a row of its own."""
        padded = self.samples + [0] * (MOST_NAMED - len(self.samples))
        return [self.what, self.count, self.parameter, *padded]

    @classmethod
    def from_row(cls, row: list[float]) -> NonFiniteSamples:
        """Read what `to_row` returned."""
        what, count, parameter, *padded = map(int, row)
        return cls(what, padded[: min(count, MOST_NAMED)], count, parameter)

    def words(self) -> str:
        """Name the samples."""
        more = "" if self.count <= len(self.samples) else " and more"
        listed = ", ".join(map(str, self.samples)) + more
        return f"training sample{'s' if self.count > 1 else ''} {listed}"

"""Names and limits of torch's pipeline schedules, for planning without torch.

They are those of `torch.distributed.pipelining.schedules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Release = tuple[int, int]
"""A release of torch: 2.13 is (2, 13)."""
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
MICROBATCHES_A_STAGE = 4
"""The bubble of a pipeline of S equal stages is (S − 1) / (M + S − 1) of its time: a fifth with M = 4 · S."""
FEWER_MICROBATCHES_SINCE: Release = (2, 11)
"""First release in which GPipe takes fewer microbatches than stages, as read in 2.9.1 and 2.11.0."""


@dataclass(frozen=True)
class Schedule:
    """One of torch's schedules."""

    name: ScheduleName
    stages_a_rank: int = 1
    """Least number of stages a rank."""
    more_stages: bool = False
    """Whether a rank may have more stages."""
    returns: bool = False
    """Whether the stages go through the ranks and back (a V), instead of starting again at the first rank."""
    splits_backward: bool = False
    """Whether gradients of the weights are computed later than those of the inputs."""
    since: Release = (2, 8)
    """First release of torch with the schedule."""

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Return the place, among a pipeline's ranks, of the one that computes a stage."""
        turn, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.returns and turn % 2 else place

    def stages_problem(self, num_stages: int, num_ranks: int) -> str | None:
        """Return the number of stages that the schedule needs instead, in words; `None` if this one fits."""
        each, rest = divmod(num_stages, num_ranks)
        if rest == 0 and (each == self.stages_a_rank or (self.more_stages and each > self.stages_a_rank)):
            return None
        least = self.stages_a_rank * num_ranks
        accepted = f"a multiple of {num_ranks} from {least} on" if self.more_stages else str(least)
        return f"{accepted} for schedule {self.name} on {num_ranks} device{'s' if num_ranks > 1 else ''}"

    def microbatches_problem(
        self, num_microbatches: int, num_stages: int, num_ranks: int, release: Release | None = None
    ) -> str | None:
        """Return the number of microbatches that it needs instead, in words; `None` if this one fits.

        Args:
            release: the oldest torch of the ranks; `None`: a new one.
        """
        as_stages = self.name in ("1F1B", "DualPipeV")
        old = self.name == "GPipe" and release is not None and release < FEWER_MICROBATCHES_SINCE
        if (as_stages or old) and num_microbatches < num_stages:
            with_torch = f" with torch {release[0]}.{release[1]}" if old and release is not None else ""
            return f"at least the {num_stages} stages for schedule {self.name}{with_torch}"
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            rounds = max(1, num_microbatches // num_ranks)
            if num_microbatches % rounds:
                return f"a multiple of the {num_ranks} devices of a pipeline for schedule {self.name}"
        return None

    def num_microbatches(self, num_stages: int, num_ranks: int, num_samples: int) -> int:
        """Return the default number of microbatches: four a stage, at most one a sample.

        If the schedule needs more microbatches than there are samples, some are empty.
        """
        number = max(1, min(MICROBATCHES_A_STAGE * num_stages, num_samples))
        if self.stages_a_rank > 1:
            return max(num_stages, number // num_ranks * num_ranks)
        return max(num_stages, number)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("GPipe"),
        Schedule("1F1B"),
        Schedule("Interleaved1F1B", stages_a_rank=2, more_stages=True),
        Schedule("LoopedBFS", stages_a_rank=2, more_stages=True),
        Schedule("InterleavedZeroBubble", stages_a_rank=2, more_stages=True, splits_backward=True),
        Schedule("ZBVZeroBubble", stages_a_rank=2, returns=True, splits_backward=True),
        Schedule("DualPipeV", stages_a_rank=2, returns=True, splits_backward=True, since=(2, 9)),
    )
}


def oldest_release(versions: Iterable[str | None]) -> Release | None:
    """Return the oldest of torch's versions (`2.13.0+cpu`), without those that are not known."""
    known = [version.split(".")[:2] for version in versions if version is not None]
    return min(((int(major), int(minor)) for major, minor in known), default=None)

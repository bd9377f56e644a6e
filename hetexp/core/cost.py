"""The cost model: what a step takes on devices of known speed. Pure functions, the same for all that ask.

A device's pass takes `fixed + per_sample · b` seconds. Gradients leave in buckets during backward; a bucket
goes to the host, is summed over the ranks there, and comes back, and each of these three channels carries one
bucket at a time. Emulated devices are paced by these functions, and runs are predicted by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Channel:
    """Something that bytes travel through, one message at a time."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Links:
    """The channels of a group of ranks.

    `exchange` is what all ranks share: host memory across vendors, the cards' own links within one, and the
    network between hosts.
    """

    device: tuple[Channel, ...]
    """Each rank's own link to the host, in each direction."""
    exchange: tuple[Channel, ...]
    """Passed one after another by every bucket: the hosts' memory, then the network if there are several."""
    staged: bool = True
    """Whether a bucket goes to the host and back; within a vendor it stays on the cards."""
    ring: int | None = None
    """Ranks that exchange, where `device` has one of each kind only; `None`: as many as `device` has."""

    @property
    def world_size(self) -> int:
        return len(self.device)

    def to_host_seconds(self, rank: int, num_bytes: float) -> float:
        """Return what it takes the rank's bucket to reach the exchange (or to come back from it)."""
        return self.device[rank].seconds(num_bytes) if self.staged else 0.0

    def exchange_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-reduce: a ring moves 2 (n − 1) / n of the bytes through each rank."""
        ranks = self.ring or self.world_size
        rounds = 2 * (ranks - 1)
        if rounds == 0:
            return 0.0
        travelled = num_bytes * rounds / ranks
        return sum(
            channel.latency_seconds * rounds + travelled / channel.bytes_per_second
            for channel in self.exchange
        )

    def gather_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-gather of so many bytes of each rank, which all pass through each one."""
        rounds = (self.ring or self.world_size) - 1
        if rounds == 0:
            return 0.0
        return sum(channel.seconds(num_bytes) * rounds for channel in self.exchange)


@dataclass(frozen=True)
class Work:
    """What one rank computes in a step, in seconds."""

    forward: tuple[float, ...]
    """One a microbatch; empty where the rank has no samples."""
    backward: tuple[float, ...]
    update: float = 0.0
    """Optimizer, and what the host does between two steps."""


@dataclass
class Timeline:
    """When things end on each rank and in the shared exchange; advanced step by step."""

    links: Links
    ends: list[float] = field(default_factory=list)
    exchange_free: float = 0.0

    def __post_init__(self) -> None:
        self.ends = self.ends or [0.0] * self.links.world_size

    def step(self, work: Sequence[Work], buckets: Sequence[tuple[float, float]]) -> None:
        """Let every rank do one step.

        Args:
            work: one a rank.
            buckets: in the order in which they leave: fraction of the last backward done by then, bytes.
        """
        started = [
            end + w.update + sum(w.forward) + sum(w.backward[:-1])
            for end, w in zip(self.ends, work, strict=True)
        ]
        backward = [w.backward[-1] if w.backward else 0.0 for w in work]
        computed = [s + b for s, b in zip(started, backward, strict=True)]
        to_host_free = list(started)
        back_free = list(started)
        for fraction, num_bytes in buckets:
            for rank in range(len(work)):
                ready = started[rank] + fraction * backward[rank]
                to_host_free[rank] = max(ready, to_host_free[rank]) + self.links.to_host_seconds(
                    rank, num_bytes
                )
            start = max(self.exchange_free, *to_host_free)
            self.exchange_free = start + self.links.exchange_seconds(num_bytes)
            for rank in range(len(work)):
                back = self.links.to_host_seconds(rank, num_bytes)
                back_free[rank] = max(self.exchange_free, back_free[rank]) + back
        self.ends = [max(c, b) for c, b in zip(computed, back_free, strict=True)]


def step_seconds(work: Sequence[Work], links: Links, buckets: Sequence[tuple[float, float]]) -> float:
    """Return how long a step takes once the ranks run in rhythm, which may be that of several steps.

    It is the slowest way from a rank back to itself, a step: the eigenvalue of the steps as a max-plus
    matrix (Baccelli et al., Synchronization and Linearity, 1992), so it never falls where something slows.
    Ranks of the same work and link have the same rows in that matrix: one of each kind is enough.
    """
    kinds = list(dict.fromkeys(zip(work, links.device, strict=True)))
    work = [one for one, _ in kinds]
    links = replace(links, device=tuple(link for _, link in kinds), ring=links.ring or links.world_size)
    slowest = 0.0
    ranks = range(links.world_size)
    for rank in ranks:
        timeline = Timeline(links, [0.0 if other == rank else -math.inf for other in ranks], -math.inf)
        for steps in range(1, links.world_size + 1):
            timeline.step(work, buckets)
            slowest = max(slowest, timeline.ends[rank] / steps)
    return slowest

"""The cost model: what a step takes on devices of known speed. Pure functions, the same for all that ask.

A device's pass takes `fixed + per_sample · b` seconds. Gradients leave in buckets during backward; a bucket
goes to the host, is summed over the ranks there, and comes back, and each of these three channels carries one
bucket at a time. Emulated devices are paced by these functions, and runs are predicted by them.

A sum of B bytes over n ranks takes 2 (n − 1) rounds of a ring, each of B / n. In memory that k ranks of a
host share it is no ring (`hetexp/comm/shared_memory/exchange.py`): each writes B bytes there, reads the k-th
part that it adds up of the k − 1 others', and the k − 1 parts that the others have added up. So k B + 2 (k −
1) B pass through that memory, 4 B with the two ranks that its rate is of: latency + (3 k − 2) / 4 · B / rate.
Where bytes are gathered each of the k reads those of all others: latency + k² / 4 · B / rate, or k − 1 rounds
of a ring. Codes are gathered, and on the last level only: memory below a network sums numbers as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Wire = Literal["float32", "bfloat16", "int8"]
WIRE_BYTES = {"bfloat16": 2.0, "int8": 1.0 + 4.0 / 256.0}
"""Of a number that is coded to travel (`hetexp/comm/compression.py`); others travel in their own type."""


@dataclass(frozen=True)
class Channel:
    """Something that bytes travel through, one message at a time."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    shared: bool = False
    """Whether it is memory that the ranks of a host share; the rate is that of a sum over two of them."""
    ranks: int | None = None
    """Ranks that exchange through it, where these are one of each host, or those of one host."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def sum_seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the time of an all-reduce of so many bytes of each of the group's ranks."""
        own = self.ranks or ranks
        if own == 1:
            return 0.0
        if self.shared:
            return self.seconds(num_bytes * (3 * own - 2) / 4)
        rounds = 2 * (own - 1)
        return self.latency_seconds * rounds + num_bytes * rounds / own / self.bytes_per_second

    def gather_seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the time of an all-gather of so many bytes of each of the group's ranks."""
        own = self.ranks or ranks
        if own == 1:
            return 0.0
        if self.shared:
            return self.seconds(num_bytes * own * own / 4)
        return self.seconds(num_bytes) * (own - 1)


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
    wire: float = 1.0
    """Bytes that travel ÷ bytes of the gradients. Below 1 codes travel: they are gathered, not summed."""

    @property
    def world_size(self) -> int:
        return len(self.device)

    @property
    def num_ranks(self) -> int:
        """Ranks that exchange."""
        return self.ring or self.world_size

    def to_host_seconds(self, rank: int, num_bytes: float) -> float:
        """Return what it takes the rank's bucket to reach the exchange (or to come back from it)."""
        return self.device[rank].seconds(num_bytes) if self.staged else 0.0

    def exchange_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-reduce of so many bytes of each rank."""
        ranks = self.num_ranks
        return sum(channel.sum_seconds(num_bytes, ranks) for channel in self.exchange)

    def coded_seconds(self, num_bytes: float, coded_bytes: float) -> float:
        """Return the time of an all-reduce of so many bytes of each rank, of which codes travel."""
        ranks = self.num_ranks
        below = self.exchange[:1] if self._leaders else ()
        seconds = sum(channel.sum_seconds(num_bytes, ranks) for channel in below)
        return seconds + sum(c.gather_seconds(coded_bytes, ranks) for c in self.exchange[len(below) :])

    def bucket_out_seconds(self, rank: int, num_bytes: float) -> float:
        """Return what it takes a bucket of gradients to leave the rank's device, coded there."""
        return self.to_host_seconds(rank, num_bytes * (self.wire if self._codes_leave else 1.0))

    def bucket_seconds(self, num_bytes: float) -> float:
        """Return the time of the exchange of a bucket of gradients."""
        if self.wire == 1.0:
            return self.exchange_seconds(num_bytes)
        return self.coded_seconds(num_bytes, num_bytes * self.wire)

    def bucket_back_seconds(self, rank: int, num_bytes: float) -> float:
        """Return what it takes the sum to come back, or the codes of all others to be added on the device."""
        others = self.wire * (self.num_ranks - 1) if self._codes_leave else 1.0
        return self.to_host_seconds(rank, num_bytes * others)

    @property
    def _leaders(self) -> bool:
        """Whether one rank of each host goes on with the sum of those that share memory."""
        return len(self.exchange) > 1 and self.exchange[0].shared

    @property
    def _codes_leave(self) -> bool:
        return self.wire != 1.0 and not self._leaders


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
                out = self.links.bucket_out_seconds(rank, num_bytes)
                to_host_free[rank] = max(ready, to_host_free[rank]) + out
            start = max(self.exchange_free, *to_host_free)
            self.exchange_free = start + self.links.bucket_seconds(num_bytes)
            for rank in range(len(work)):
                back = self.links.bucket_back_seconds(rank, num_bytes)
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

"""The cost model: the time of a step on devices of known speed. Pure functions.

A device's pass takes `fixed + per_sample · b` seconds. Gradients leave in buckets during backward. A bucket
goes to the host, is summed over the ranks there, and comes back. Each of these three channels carries one
bucket at a time. The same functions pace emulated devices and predict runs.

A sum of B bytes over n ranks takes 2 (n − 1) rounds of a ring, each of B / n. In memory that k ranks of a
host share there is no ring (`hetexp/comm/shared_memory/exchange.py`). Each rank writes B bytes, reads its
k-th part of the k − 1 others, adds these up, and reads the k − 1 sums of the others. So k B + 2 (k − 1) B
pass through that memory. Its rate is that of two ranks, which pass 4 B: latency + (3 k − 2) / 4 · B / rate.
In a gather each of the k ranks reads the bytes of all others: latency + k² / 4 · B / rate, or k − 1 rounds of
a ring. Compressed gradients are gathered, on the last level only; lower levels sum uncompressed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Wire = Literal["float32", "bfloat16", "int8"]
WIRE_BYTES = {"bfloat16": 2.0, "int8": 1.0 + 4.0 / 256.0}
"""Bytes of a compressed number (`hetexp/comm/compression.py`); others keep their own type."""


@dataclass(frozen=True)
class Channel:
    """A link or a memory that carries one message at a time."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    shared: bool = False
    """Whether it is memory that the ranks of a host share; its rate is that of a sum over two ranks."""
    ranks: int | None = None
    """Number of ranks that use it, if only one rank of each host, or the ranks of one host; `None`: all."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def sum_seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the time of an all-reduce of so many bytes of each of the group's ranks."""
        group_size = self.ranks or ranks
        if group_size == 1:
            return 0.0
        if self.shared:
            return self.seconds(num_bytes * (3 * group_size - 2) / 4)
        rounds = 2 * (group_size - 1)
        return self.latency_seconds * rounds + num_bytes * rounds / group_size / self.bytes_per_second

    def gather_seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the time of an all-gather of so many bytes of each of the group's ranks."""
        group_size = self.ranks or ranks
        if group_size == 1:
            return 0.0
        if self.shared:
            return self.seconds(num_bytes * group_size * group_size / 4)
        return self.seconds(num_bytes) * (group_size - 1)


@dataclass(frozen=True)
class Links:
    """The channels of a group of ranks.

    `exchange` is what all ranks share: host memory across vendors, the cards' own links within one, and the
    network between hosts.
    """

    device: tuple[Channel, ...]
    """Each rank's own link to the host, in each direction."""
    exchange: tuple[Channel, ...]
    """Channels of every bucket in turn: the hosts' memory, then the network if there are several hosts."""
    staged: bool = True
    """Whether a bucket goes to the host and back; with a vendor's library it stays on the cards."""
    ring: int | None = None
    """Number of ranks, if `device` has only one rank of each kind; `None`: as many as `device` has."""
    wire: float = 1.0
    """Sent bytes ÷ bytes of the gradients. Below 1 they are compressed, and gathered instead of summed."""

    @property
    def world_size(self) -> int:
        return len(self.device)

    @property
    def num_ranks(self) -> int:
        """Ranks that exchange."""
        return self.ring or self.world_size

    def to_host_seconds(self, rank: int, num_bytes: float) -> float:
        """Return the seconds of a rank's bucket to the exchange, or back from it."""
        return self.device[rank].seconds(num_bytes) if self.staged else 0.0

    def exchange_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-reduce of so many bytes of each rank."""
        ranks = self.num_ranks
        return sum(channel.sum_seconds(num_bytes, ranks) for channel in self.exchange)

    def coded_seconds(self, num_bytes: float, coded_bytes: float) -> float:
        """Return the time of an all-reduce of so many bytes of each rank, with compression."""
        ranks = self.num_ranks
        below = self.exchange[:1] if self._leaders else ()
        seconds = sum(channel.sum_seconds(num_bytes, ranks) for channel in below)
        return seconds + sum(c.gather_seconds(coded_bytes, ranks) for c in self.exchange[len(below) :])

    def bucket_out_seconds(self, rank: int, num_bytes: float) -> float:
        """Return the seconds of a bucket of gradients from the rank's device, which compresses it."""
        return self.to_host_seconds(rank, num_bytes * (self.wire if self._codes_leave else 1.0))

    def bucket_seconds(self, num_bytes: float) -> float:
        """Return the time of the exchange of a bucket of gradients."""
        if self.wire == 1.0:
            return self.exchange_seconds(num_bytes)
        return self.coded_seconds(num_bytes, num_bytes * self.wire)

    def bucket_back_seconds(self, rank: int, num_bytes: float) -> float:
        """Return the seconds of the sum back to the device, or of the compressed gradients of all others."""
        others = self.wire * (self.num_ranks - 1) if self._codes_leave else 1.0
        return self.to_host_seconds(rank, num_bytes * others)

    @property
    def _leaders(self) -> bool:
        """Whether one rank of each host exchanges the sum of the ranks that share memory."""
        return len(self.exchange) > 1 and self.exchange[0].shared

    @property
    def _codes_leave(self) -> bool:
        return self.wire != 1.0 and not self._leaders


@dataclass(frozen=True)
class Work:
    """One rank's seconds of computation in a step."""

    forward: tuple[float, ...]
    """Of each microbatch; empty if the rank has no samples."""
    backward: tuple[float, ...]
    update: float = 0.0
    """Optimizer and the host's work between two steps."""


@dataclass
class Timeline:
    """The end of the last step on each rank and in the shared exchange, advanced step by step."""

    links: Links
    ends: list[float] = field(default_factory=list)
    exchange_free: float = 0.0

    def __post_init__(self) -> None:
        self.ends = self.ends or [0.0] * self.links.world_size

    def step(self, work: Sequence[Work], buckets: Sequence[tuple[float, float]]) -> None:
        """Advance every rank by one step.

        Args:
            work: of each rank.
            buckets: in their order: fraction of the last backward pass done by then, bytes.
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
    """Return the mean time of a step in the steady state, whose period may be several steps.

    It is the eigenvalue of the step as a max-plus matrix (Baccelli et al., Synchronization and Linearity,
    1992): the slowest cycle from a rank back to itself, divided by its steps. So it never falls if something
    slows down. Ranks with the same work and link have the same rows, so that one rank of each kind is enough.
    """
    kinds = list(dict.fromkeys(zip(work, links.device, strict=True)))
    work = [work_of_kind for work_of_kind, _ in kinds]
    links = replace(links, device=tuple(link for _, link in kinds), ring=links.ring or links.world_size)
    slowest = 0.0
    ranks = range(links.world_size)
    for rank in ranks:
        timeline = Timeline(links, [0.0 if other == rank else -math.inf for other in ranks], -math.inf)
        for steps in range(1, links.world_size + 1):
            timeline.step(work, buckets)
            slowest = max(slowest, timeline.ends[rank] / steps)
    return slowest

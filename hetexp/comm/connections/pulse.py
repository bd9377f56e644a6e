"""Heartbeats of ranks during long work, so that the others wait for slow ranks and not for dead ones.

A collective gives up after a fixed time, whatever the missing rank is doing. After work without collectives,
such as an evaluation or a checkpoint, ranks therefore meet through the store first. There they wait without a
limit for a rank that sends heartbeats, and up to the limit for any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from hetexp.core.errors import PeerLostError

BEATS = 5
"""Heartbeats within the limit, about."""
LONGEST_PAUSE = 2.0
"""Most seconds between two heartbeats."""


class Pulse:
    """One rank's heartbeats, and its check of the others'.

    Args:
        store: shared by all ranks.
        timeout_seconds: longest time without a heartbeat.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._limit = self.timeout_seconds = timeout_seconds
        self._pause = min(timeout_seconds / BEATS, LONGEST_PAUSE)
        self._beats = self._met = 0
        self._last = float("-inf")

    def beat(self) -> None:
        """Send a heartbeat if one is due; cheap, so that a loop may call it every time."""
        now = time.monotonic()
        if now - self._last >= self._pause:
            self._last = now
            self._beats += 1
            self._store.set(f"pulse/{self._rank}", str(self._beats))

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats while the block runs, for work that cannot call `beat`."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self._pause):
                self.beat()

        thread = threading.Thread(target=beat, name="pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def meet(self) -> None:
        """Return once every rank has called it.

        Raises:
            PeerLostError: a rank sent no heartbeat for too long; names the rank.
        """
        self._met += 1
        self._store.set(f"met/{self._met}/{self._rank}", "")
        if self._met > 2:  # all ranks were at the last meeting, and so have left the one before it
            self._store.delete_key(f"met/{self._met - 2}/{self._rank}")
        seen: dict[int, tuple[bytes, float]] = {}
        for other in range(self._world_size):
            while not self._came(other):
                self._look(other, seen)

    def _came(self, other: int) -> bool:
        try:
            self._store.wait([f"met/{self._met}/{other}"], timedelta(seconds=self._pause))
        except RuntimeError:
            return False
        return True

    def _look(self, other: int, seen: dict[int, tuple[bytes, float]]) -> None:
        key, now = f"pulse/{other}", time.monotonic()
        beats = self._store.get(key) if self._store.check([key]) else b""
        if other not in seen or seen[other][0] != beats:
            seen[other] = (beats, now)
        elif now - seen[other][1] > self._limit:
            raise PeerLostError(f"rank {other} gave no sign of life for {self._limit:g} s")

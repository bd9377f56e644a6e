"""Processes that SIGSTOP has stopped before or after the training, when no heartbeats are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hetexp.launch.elastic.health import Usage, usage_of
from hetexp.launch.processes.members import Member


class StoppedWatch:
    """Measures how long processes have been stopped (SIGSTOP), on Linux only.

    Args:
        seconds: twice the longest time between two calls. After a longer time this process itself was
            stopped, and the measurement starts again at zero.
        clock: returns monotonic seconds.
        usage: returns the kernel's counts of a process, by its id.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[int], Usage | None] = usage_of,
    ) -> None:
        self._seconds, self._clock, self._usage = seconds, clock, usage
        self._since: dict[int, float] = {}
        """Member → when it was first observed as stopped."""
        self._looked = self._last = clock()

    def look(self, members: Sequence[Member]) -> dict[Member, float]:
        """Return how long each stopped member has been stopped; cheap enough for any loop."""
        now = self._clock()
        if now - self._last > self._seconds / 2:
            self._since.clear()
        self._last = now
        if now - self._looked >= self._seconds / 8:
            self._looked = now
            for member in members:
                usage = self._usage(member.process.pid)
                if usage is not None and usage.stopped:
                    self._since.setdefault(member.number, now)
                else:
                    self._since.pop(member.number, None)
        return {
            member: now - self._since[member.number] for member in members if member.number in self._since
        }

"""Processes that the kernel has stopped, where no signs of life are due: before training, and after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hetexp.launch.elastic.health import Usage, usage_of
from hetexp.launch.processes.members import Member


class StoppedWatch:
    """Knows how long processes have been stopped (SIGSTOP); only Linux tells.

    Args:
        seconds: twice the longest time between two looks in which nothing is missed. After a longer time, in
            which this process was stopped itself, the watch counts from zero.
        clock: monotonic seconds.
        usage: returns what a process did, by its id.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[int], Usage | None] = usage_of,
    ) -> None:
        self._seconds, self._clock, self._usage = seconds, clock, usage
        self._since: dict[int, float] = {}
        """Member → when it was first seen stopped."""
        self._looked = self._last = clock()

    def look(self, members: Sequence[Member]) -> dict[Member, float]:
        """Return for how long each of these has been stopped; cheap enough to be called in any loop."""
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
        return {one: now - self._since[one.number] for one in members if one.number in self._since}

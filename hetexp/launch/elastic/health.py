"""Whether members live: their heartbeats, and the kernel's counts of processes that send none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetexp.core.epoch import SignedStore, beat_key
from hetexp.launch.elastic.heartbeat import BEATS, Heartbeat
from hetexp.launch.processes.members import Member

UNSEEN = 5.0
"""Silence that ends a member, in `fault.heartbeat_seconds`, if the kernel has no counts or a disk is slow."""


@dataclass(frozen=True)
class Usage:
    """The kernel's counts of a process."""

    ticks: int
    """CPU time of all its threads."""
    stopped: bool
    """Whether SIGSTOP stopped it."""
    runs: bool
    """Whether a thread computes, is ready to, or is in a debugger."""
    waits_for_disk: bool


def usage_of(pid: int) -> Usage | None:
    """Return the kernel's counts of a process; `None` on other systems than Linux."""
    try:
        state, ticks = _stat(Path(f"/proc/{pid}/stat"))
        others = [_stat(path)[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (OSError, ValueError, IndexError):
        return None
    states = {state, *others}
    return Usage(ticks, state == "T", bool(states & {"R", "t"}), "D" in states)


def _stat(path: Path) -> tuple[str, int]:
    """Return state and ticks (proc_pid_stat(5)); the name before them may have any characters."""
    fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


@dataclass
class _Seen:
    """The last observation of a member."""

    raw: str
    beat: Heartbeat
    since: float
    """When this beat was first seen."""
    ticks: int
    quiet_since: float
    """When it last sent a heartbeat or computed."""
    step_since: float
    """When it first reported this step, or that it trains."""


class HealthMonitor:
    """Finds members that neither send heartbeats nor compute.

    A rank with a busy interpreter computes, but sends no heartbeat. A rank that waits for others sends
    heartbeats, but does not compute. A rank that is stopped, or hangs in a driver, does neither.

    Args:
        store: the launcher's connection to the store.
        heartbeat_seconds: longest silence.
        clock: returns monotonic seconds.
        usage: returns the kernel's counts of a process, by its id.
    """

    def __init__(
        self,
        store: SignedStore,
        heartbeat_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[int], Usage | None] = usage_of,
    ) -> None:
        self._store, self._limit, self._clock, self._usage = store, heartbeat_seconds, clock, usage
        self._seen: dict[int, _Seen] = {}
        self._looked = self._last = clock()

    def frozen(self, members: Sequence[Member]) -> list[Member]:
        """Return the members that are frozen now; cheap enough to be called in any loop."""
        now = self._clock()
        if now - self._last > self._limit / 2:  # this process itself was stopped, or had no time to look
            self._forgive(now)
        self._last = now
        if now - self._looked < self._limit / BEATS / 2:
            return []
        self._looked = now
        return [member for member in members if self._is_frozen(member, now)]

    def beat_of(self, member: int) -> Heartbeat | None:
        """Return a member's last heartbeat, `None` if it has sent none yet."""
        seen = self._seen.get(member)
        return seen.beat if seen is not None else None

    def seconds_in_step(self, member: int) -> float | None:
        """Return how long a member has been in its step; `None` before its first heartbeat."""
        seen = self._seen.get(member)
        return self._clock() - seen.step_since if seen is not None else None

    def _is_frozen(self, member: Member, now: float) -> bool:
        key, seen = beat_key(member.number), self._seen.get(member.number)
        raw = self._store.read(key)
        if seen is None and raw is None:  # it has not begun
            return False
        if raw is not None and (seen is None or raw != seen.raw):
            self._see(member, raw, seen, now)
            return False
        assert seen is not None
        silence = now - seen.since
        if silence < self._limit / 2:
            return False
        usage = self._usage(member.process.pid)
        if usage is None:
            return silence > self._limit * UNSEEN
        if usage.stopped:
            return silence > self._limit
        if usage.runs or usage.ticks != seen.ticks:
            seen.ticks, seen.quiet_since = usage.ticks, now
            return False
        return now - seen.quiet_since > self._limit * (UNSEEN if usage.waits_for_disk else 1.0)

    def _see(self, member: Member, raw: str, seen: _Seen | None, now: float) -> None:
        usage, beat = self._usage(member.process.pid), Heartbeat.from_json(raw)
        ticks = usage.ticks if usage is not None else 0
        same = seen is not None and (seen.beat.step, seen.beat.doing) == (beat.step, beat.doing)
        since = seen.step_since if same and seen is not None else now
        self._seen[member.number] = _Seen(raw, beat, now, ticks, now, since)

    def _forgive(self, now: float) -> None:
        for seen in self._seen.values():
            seen.since = seen.quiet_since = seen.step_since = now

"""Detects a step that no rank finishes, and the rank that the others wait for."""

from __future__ import annotations

import re
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetexp.launch.elastic.health import HealthMonitor
from hetexp.launch.elastic.heartbeat import STEPS
from hetexp.launch.processes.failure import stack_path
from hetexp.launch.processes.members import Member
from hetexp.launch.processes.process import signal_rank

FACTOR = 20.0
"""Longest step ÷ median step."""
LEAST_SECONDS = 5.0
"""Longest step at least: a disk, a garbage collection or another job may delay it."""
FIRST_SECONDS = 120.0
"""Longest step at least before one was measured: kernels are built and chosen in the first steps."""
STACK_SECONDS = 0.5
"""Time for a rank to write its stack beside its log."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_MAIN = "run_rank"
"""A function in the stack of each rank's main thread, and in no other."""
_WAITS = re.compile(r"hetexp/comm/|torch/distributed/|torch/autograd/graph\.py|torch/nn/parallel/")
"""Files whose functions take long only if they wait for other ranks."""
_PAUSES = re.compile(r"/(threading|queue|contextlib)\.py$|torch/cuda/streams\.py$|hetexp/hardware/backends/")
"""Files whose functions wait for whatever their caller waits for."""
_LOADS = re.compile(r"hetexp/data/|torch/utils/data/")
"""Files that load samples, from a disk or a network that may be slow."""
_BUILDS = re.compile(r"torch/_(dynamo|inductor|functorch)/|/triton/")
"""Files that build kernels, for which there is no limit."""
LOAD_SECONDS = 60.0
"""Longest wait of a step for samples."""
LATER_SECONDS = 30.0
"""Pause before the stacks are read again."""


@dataclass(frozen=True)
class HungRank:
    """A rank that the others wait for."""

    member: Member
    step: int
    seconds: float
    """How long its step has taken by now."""
    place: str
    """The innermost function of its main thread, with file and line."""
    stack: str
    """Of all its threads, as faulthandler writes it."""


class HangWatch:
    """Finds a step that takes far longer than others, and the rank that is the reason.

    All ranks wait for each other in every step. So their stacks show the reason, and not their step numbers.

    Args:
        health: has each member's last heartbeat.
        predicted_seconds: of a step, by the plan; `None`: not known.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        health: HealthMonitor,
        predicted_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._health, self._predicted, self._clock = health, predicted_seconds, clock
        self._reported: dict[int, tuple[int, float]] = {}
        """Member → its last reported step, and the time of that report."""
        self._seconds: deque[float] = deque(maxlen=50)
        """Seconds of the last steps, as measured here."""
        self._first_seconds = 0.0
        """Largest mean step of the members, who may do many steps between two calls, and then hang."""
        self._asked_at: float | None = None
        self._not_before = 0.0
        self.all_wait = False
        """Whether the last stacks show that all ranks wait for each other."""
        self._sizes: dict[int, int] = {}
        """Member → bytes of its stack's file before it writes the next stack."""

    @property
    def bound_seconds(self) -> float:
        """The longest time that a step may take."""
        if self._seconds:
            return max(LEAST_SECONDS, FACTOR * statistics.median(self._seconds))
        if self._first_seconds:
            return max(LEAST_SECONDS, FACTOR * self._first_seconds)
        return max(FIRST_SECONDS, FACTOR * (self._predicted or 0.0))

    def overdue(self, members: Sequence[Member]) -> list[Member]:
        """Return the members that have been in one step for longer than a step may take."""
        overdue = []
        for member in members:
            beat, spent = self._health.beat_of(member.number), self._health.seconds_in_step(member.number)
            if beat is not None and spent is not None and beat.doing == STEPS and spent > self.bound_seconds:
                overdue.append(member)
        return overdue

    def find_hung(self, members: Sequence[Member]) -> list[HungRank]:
        """Return the ranks that an overdue step waits for; empty if no step is overdue."""
        now = self._clock()
        overdue = self._overdue_step(members, now)
        self.all_wait = False
        if overdue is None or now < self._not_before:
            self._asked_at = None
            return []
        if self._asked_at is None:
            self._asked_at = now
            self._sizes = {member.number: _size(stack_path(member.log_path)) for member in members}
            for member in members:
                _ask_for_stack(member)
            return []
        if now - self._asked_at < STACK_SECONDS:
            return []
        self._asked_at, self._not_before = None, now + LATER_SECONDS
        stacks = {member: _new_text(member, self._sizes.get(member.number, 0)) for member in members}
        hung = not_waiting(stacks, overdue[1])
        self.all_wait = not hung and all(waits(stack) for stack in stacks.values())
        if len(hung) == len(members):  # no rank waits for another: all are slow
            return []
        return [HungRank(member, *overdue, innermost_frame(stack), stack) for member, stack in hung.items()]

    def _overdue_step(self, members: Sequence[Member], now: float) -> tuple[int, float] | None:
        """Return the step that all members are in for too long, and its seconds; `None` if there is none."""
        steps, seconds = [], []
        for member in members:
            beat, spent = self._health.beat_of(member.number), self._health.seconds_in_step(member.number)
            if beat is None or beat.step is None or spent is None or beat.doing != STEPS:
                self._reported.pop(member.number, None)
                return None
            self._measure(member.number, beat.step, now)
            if not self._seconds and beat.step_seconds is not None:
                self._first_seconds = max(self._first_seconds, beat.step_seconds)
            steps.append(beat.step)
            seconds.append(spent)
        if not steps or min(seconds) <= self.bound_seconds:
            return None
        return max(steps), min(seconds)

    def _measure(self, member: int, step: int, now: float) -> None:
        """Measure a member's steps since its last report."""
        before = self._reported.get(member)
        if before is not None and step == before[0]:
            return
        if before is not None and step > before[0]:
            self._seconds.append((now - before[1]) / (step - before[0]))
        self._reported[member] = (step, now)


def not_waiting(stacks: Mapping[Member, str], seconds: float) -> dict[Member, str]:
    """Return the ranks that do not wait for others, with their stacks.

    The result is empty if all wait, or if one of them has a reason to take long.

    Args:
        stacks: of each rank; empty for a rank that does not even take signals.
        seconds: of their step so far.
    """
    busy = {member: stack for member, stack in stacks.items() if not waits(stack)}
    for stack in busy.values():
        files = [file for file, _, _ in _main_frames(stack)]
        loads = any(_LOADS.search(file) for file in files) and seconds < LOAD_SECONDS
        if loads or any(_BUILDS.search(file) for file in files):
            return {}
    return busy


def waits(stack: str) -> bool:
    """Return whether a rank's main thread waits for other ranks."""
    frames = _own_frames(stack)
    return bool(frames) and _WAITS.search(frames[0][0]) is not None


def innermost_frame(stack: str) -> str:
    """Return where a rank's main thread is: its innermost function outside Python's own waiting."""
    frames = _own_frames(stack)
    if not frames:
        return "an unknown place: it does not even take signals"
    file, line, name = frames[0]
    return f"{name} ({file}:{line})"


def _own_frames(stack: str) -> list[tuple[str, str, str]]:
    """Return the main thread's frames without those of Python's own waiting, and of waits for the device."""
    return [frame for frame in _main_frames(stack) if not _PAUSES.search(frame[0])]


def _main_frames(stack: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the main thread's frames, the innermost first."""
    current = []
    for thread in re.split(r"\n\s*\n", stack):
        frames = [(match["file"], match["line"], match["name"]) for match in _FRAME.finditer(thread)]
        if any(name == _MAIN for _, _, name in frames):
            return frames
        if "Current thread" in thread:  # it takes the signals; the outer part of a deep stack is cut off
            current = frames
    return current


def _ask_for_stack(member: Member) -> None:
    if hasattr(signal, "SIGUSR1"):
        signal_rank(member.process, signal.SIGUSR1)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _new_text(member: Member, size: int) -> str:
    path = stack_path(member.log_path)
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(size)
        return file.read(256 * 1024).decode(errors="replace")

"""A step that no rank finishes: how long one may take, and which rank the others wait for."""

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
"""Times a usual step's seconds that one may take."""
LEAST_SECONDS = 5.0
"""That any step may take: a disk, a garbage collection, another job."""
FIRST_SECONDS = 120.0
"""That a step may take before any was measured: kernels are built and chosen in the first ones."""
STACK_SECONDS = 0.5
"""Time for a rank to write its stack beside its log."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_MAIN = "run_rank"
"""A function in the stack of each rank's main thread, and in no other."""
_WAITS = re.compile(r"hetexp/comm/|torch/distributed/|torch/autograd/graph\.py|torch/nn/parallel/")
"""Files whose functions wait for other ranks, if they do anything for long."""
_LOADS = re.compile(r"hetexp/data/|torch/utils/data/")
"""Files that load samples, from a disk or a network that may be slow."""
_BUILDS = re.compile(r"torch/_(dynamo|inductor|functorch)/|/triton/")
"""Files that build kernels, which takes as long as it takes."""
LOAD_SECONDS = 60.0
"""That a step may wait for samples."""
LATER_SECONDS = 30.0
"""Pause before a step is looked at again that takes long for a reason."""


@dataclass(frozen=True)
class Hung:
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
    """Finds a step that takes far longer than steps do, and the rank that is the reason.

    All ranks wait for each other in every step, so that their own numbers of steps do not tell which one is
    the reason: their stacks do.

    Args:
        watch: knows each member's last heartbeat.
        predicted_seconds: of a step, by the plan; `None`: not known.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        watch: HealthMonitor,
        predicted_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch, self._predicted, self._clock = watch, predicted_seconds, clock
        self._reported: dict[int, tuple[int, float]] = {}
        """Member → the step that it reported last, and when it was first seen."""
        self._seconds: deque[float] = deque(maxlen=50)
        """Of steps as measured here."""
        self._first_seconds = 0.0
        """Of a step by the members' own means: they may do many between two looks, and hang in the next."""
        self._asked_at: float | None = None
        self._not_before = 0.0
        self.all_wait = False
        """Whether all ranks were just found to wait for each other."""
        self._sizes: dict[int, int] = {}
        """Member → bytes of its stack's file before it was asked."""

    @property
    def bound_seconds(self) -> float:
        """How long a step may take."""
        if self._seconds:
            return max(LEAST_SECONDS, FACTOR * statistics.median(self._seconds))
        if self._first_seconds:
            return max(LEAST_SECONDS, FACTOR * self._first_seconds)
        return max(FIRST_SECONDS, FACTOR * (self._predicted or 0.0))

    def in_steps(self, members: Sequence[Member]) -> list[Member]:
        """Return the members that have been in one step for longer than a step may take."""
        found = []
        for member in members:
            beat, spent = self._watch.beat_of(member.number), self._watch.seconds_in_step(member.number)
            if beat is not None and spent is not None and beat.doing == STEPS and spent > self.bound_seconds:
                found.append(member)
        return found

    def look(self, members: Sequence[Member]) -> list[Hung]:
        """Return the ranks that an overdue step waits for; empty if no step is overdue."""
        now = self._clock()
        over = self._overdue(members, now)
        self.all_wait = False
        if over is None or now < self._not_before:
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
        found = blamed(stacks, over[1])
        self.all_wait = not found and all(waits(stack) for stack in stacks.values())
        if len(found) == len(members):  # no rank waits for another: all are slow
            return []
        return [Hung(member, *over, place_in(stack), stack) for member, stack in found.items()]

    def _overdue(self, members: Sequence[Member], now: float) -> tuple[int, float] | None:
        """Return the step that all members are in for too long, and how long; `None` where there is none."""
        steps, seconds = [], []
        for member in members:
            beat, spent = self._watch.beat_of(member.number), self._watch.seconds_in_step(member.number)
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
        """Take in how long a member's steps took since it last reported other ones."""
        before = self._reported.get(member)
        if before is not None and step == before[0]:
            return
        if before is not None and step > before[0]:
            self._seconds.append((now - before[1]) / (step - before[0]))
        self._reported[member] = (step, now)


def blamed(stacks: Mapping[Member, str], seconds: float) -> dict[Member, str]:
    """Return the ranks that do not wait for others, with their stacks; empty if all wait.

    Args:
        stacks: what each wrote when it was asked; empty where it does not even take signals.
        seconds: that their step has taken.
    """
    found = {member: stack for member, stack in stacks.items() if not waits(stack)}
    for stack in found.values():
        files = [file for file, _, _ in _main_frames(stack)]
        loads = any(_LOADS.search(file) for file in files) and seconds < LOAD_SECONDS
        if loads or any(_BUILDS.search(file) for file in files):
            return {}
    return found


def waits(stack: str) -> bool:
    """Return whether a rank's main thread waits for other ranks."""
    frames = _own_frames(stack)
    return bool(frames) and _WAITS.search(frames[0][0]) is not None


def place_in(stack: str) -> str:
    """Return where a rank's main thread is: the innermost function that is not Python's own waiting."""
    frames = _own_frames(stack)
    if not frames:
        return "no place that it could tell: it does not even take signals"
    file, line, name = frames[0]
    return f"{name} ({file}:{line})"


def _own_frames(stack: str) -> list[tuple[str, str, str]]:
    """Return the main thread's frames without those in which Python itself waits for something."""
    return [frame for frame in _main_frames(stack) if not frame[0].endswith(("/threading.py", "/queue.py"))]


def _main_frames(stack: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the main thread's frames, the innermost first."""
    current = []
    for thread in re.split(r"\n\s*\n", stack):
        frames = [(one["file"], one["line"], one["name"]) for one in _FRAME.finditer(thread)]
        if any(name == _MAIN for _, _, name in frames):
            return frames
        if "Current thread" in thread:  # the one that takes signals; the rest of a deep stack is cut off
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

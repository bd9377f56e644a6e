"""A process that has imported all that a rank needs, and waits until a lost device needs it.

The import of torch, of hetexp and of the run's own modules takes most of a rank's start. A spare process has
opened no device, so that it can drive any that its interpreter can.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetexp.core.errors import logged
from hetexp.core.plan import Plan
from hetexp.hardware.backend import VISIBILITY
from hetexp.hardware.backends.sysfs import host_memory
from hetexp.hardware.detection.machine import Machine
from hetexp.launch.processes.parent_death import die_with_parent
from hetexp.launch.processes.process import (
    LAUNCHER_PID,
    Start,
    SubprocessRank,
    forks,
    signal_group,
    start_worker,
)

AFTER_SECONDS = 5.0
"""Pause before a spare process starts: its imports compete with the first steps, and short runs need none."""
BETWEEN_SECONDS = 1.0
"""Pause between two looks at what is missing, each of which starts at most one process."""
EACH = 2
"""Spare processes of an interpreter: a second loss may follow before another one has imported everything."""
LEAST_BYTES = 4 * 2**30
"""Memory that the host must have left, of which a spare process takes about a tenth."""
LOG = "spare.log"
_DRIVERS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""Device files that a process has open once it has chosen its devices."""


class Spare:
    """One waiting process.

    Args:
        start: of any rank with the same interpreter.
    """

    def __init__(self, start: Start) -> None:
        # Which devices it may see follows with the order.
        environment = {key: value for key, value in start.environment.items() if key not in VISIBILITY}
        arguments = ["--spare", str(start.plan_path)]
        self._process = start_worker(start, arguments, environment, start.log_path.parent / LOG)

    @property
    def waits(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def become(self, start: Start) -> SubprocessRank:
        """Make the process a rank.

        Raises:
            OSError: it has ended.
        """
        order = {
            "plan": str(start.plan_path),
            "rank": start.rank,
            "member": start.member,
            "environment": start.environment | {LAUNCHER_PID: str(os.getpid())},
            "working_dir": start.working_dir,
            "log": str(start.log_path),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return SubprocessRank(start, self._process)

    def end(self) -> None:
        """Kill the process, and return when it has ended."""
        signal_group(self._process, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class Spares:
    """The spare processes of a run on this machine: a few of each interpreter.

    Args:
        method: `launch.start_method`. A fork server has imported everything anyway.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._spares: dict[str, list[Spare]] = {}
        self._not_before = time.monotonic() + AFTER_SECONDS
        self._closed = False

    def keep(self, starts: Iterator[Start]) -> None:
        """Start the next process that is missing, if it is time and the host has memory.

        Args:
            starts: a start of each device of this machine.
        """
        if self._closed or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + BETWEEN_SECONDS  # the launcher asks many times a second
        for start in starts:
            waiting = self._spares.setdefault(start.interpreter, [])
            if len(waiting) >= EACH or forks(start.interpreter, self._method):
                continue
            if _free_bytes() < LEAST_BYTES:
                return
            with contextlib.suppress(OSError):  # a full disk, say: a lost device then starts without it
                waiting.append(Spare(start))
            return

    def take(self, interpreter: str) -> Spare | None:
        """Return the oldest waiting process of an interpreter, which then belongs to the caller, if any.

        A process that has ended is not replaced, as the next one would end as well.
        """
        waiting = self._spares.get(interpreter, [])
        spare = next((spare for spare in waiting if spare.waits), None)
        if spare is not None:
            waiting.remove(spare)
        return spare

    def close(self) -> None:
        """End all that still wait."""
        self._closed = True
        for waiting in self._spares.values():
            for spare in waiting:
                spare.end()
        self._spares.clear()


def wait_for_order(plan_path: Path) -> tuple[Path, int, int | None]:
    """Import everything, wait until the launcher needs a rank, and take that rank's place.

    Returns:
        Plan, rank and member of the rank. The process ends if it is not needed, or fits no device.
    """
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    _import_all(Plan.read(plan_path))
    if _has_driver_open():
        print("An imported module has opened a device, so that this process can drive no other.", flush=True)
        sys.exit(1)
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), 2**16)
        if not part:  # the launcher has ended
            sys.exit(0)
        text += part
    order: dict[str, Any] = json.loads(text)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["working_dir"])
    return Path(order["plan"]), order["rank"], order["member"]


def _import_all(plan: Plan) -> None:
    """Import all that a rank of a plan uses, as far as that is possible."""
    sys.path += [path for path in plan.import_paths if path not in sys.path]
    for name in ("hetexp.launch.processes.preload", *_modules_of(plan.config)):
        with logged(f"{name} is left to the rank to import"):
            importlib.import_module(name)


def _modules_of(config: Any) -> Iterator[str]:
    """Yield the modules of all `_target_` in a configuration."""
    if isinstance(config, dict):
        target = config.get("_target_")
        if isinstance(target, str) and "." in target:
            yield target.rpartition(".")[0]
        for value in config.values():
            yield from _modules_of(value)
    elif isinstance(config, list):
        for value in config:
            yield from _modules_of(value)


def _has_driver_open() -> bool:
    folder = Path("/proc/self/fd")
    links = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    return any(link.startswith(_DRIVERS) for link in links)


def _free_bytes() -> float:
    """Return the host's memory that is left; infinite if the system does not tell."""
    available = host_memory(Machine())[1]
    return math.inf if available is None else available

"""The members of a run: processes with a number and a log, from their start to their end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import hetexp
from hetexp.core.config import variables
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.core.files import no_room, remove_temporary_folders
from hetexp.core.plan import Plan
from hetexp.hardware.backend import environment_together
from hetexp.launch.processes.failure import log_path, stack_path
from hetexp.launch.processes.hosts import host_of, network_environment
from hetexp.launch.processes.process import (
    RUN_SECRET,
    RankProcess,
    Start,
    may_fork,
    rank_environment,
    signal_group,
    start_rank,
)
from hetexp.launch.processes.spare import Spares


@dataclass(frozen=True)
class Member:
    """A process that trains, has trained, or is about to train."""

    number: int
    device: DeviceSpec
    process: RankProcess
    log_path: Path

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        signal_group(self.process, signal.SIGKILL)


def start_member(
    plan: Plan,
    plan_path: Path,
    rank: int,
    method: str,
    secret: str,
    number: int | None = None,
    joins: bool = False,
    spares: Spares | None = None,
) -> Member:
    """Start the process of a rank.

    Args:
        method: `launch.start_method`.
        secret: by which the run's processes sign what they write to the store.
        number: of the member; `None`: that of the rank.
        joins: whether it joins a running training.
        spares: waiting processes, one of which may become the rank.

    Raises:
        SetupError: it cannot be started.
        OSError: the disk has no room for its log.
    """
    device, number = plan.devices[rank], rank if number is None else number
    backends = [each.backend for each in plan.devices_of(rank)]
    if method == "auto" and (plan.script is not None or not may_fork(backends) or _sets_variables(plan)):
        method = "subprocess"
    start = start_of(plan, plan_path, rank, secret, number if joins else None)
    path, host = start.log_path, host_of(device)
    spare = spares.take(start.interpreter) if spares is not None and host is None else None
    try:
        if spare is not None:
            return Member(number, device, spare.become(start), path)
        process = start_rank(start, method) if host is None else host.start(start, method)
        return Member(number, device, process, path)
    except OSError as error:
        if no_room(error, Path(plan.run_dir)):
            raise
        raise SetupError(f"Rank {rank} on {device} cannot be started: {error}.") from error


def _sets_variables(plan: Plan) -> bool:
    """Return whether the configuration sets variables, which a library may read when it is imported."""
    return bool(plan.config.get("comm", {}).get("env"))


def start_of(plan: Plan, plan_path: Path, rank: int, secret: str, member: int | None = None) -> Start:
    """Return the parameters of a rank's process.

    Args:
        secret: as in `start_member`.
        member: number of a member that joins a running training.
    """
    return Start(
        plan_path=plan_path,
        rank=rank,
        interpreter=plan.devices[rank].python or sys.executable,
        environment=environment_of(plan, rank) | {RUN_SECRET: secret},
        working_dir=plan.working_dir,
        log_path=log_path(Path(plan.run_dir), rank if member is None else member),
        member=member,
        store_port=plan.store_port,
        checkpoint=plan.config.get("resume"),
    )


def pause_for(members: Sequence[Member], seconds: float) -> None:
    """Return when one of the processes ends, or after some seconds.

    On systems without a descriptor for the end of a process it is always after these seconds.
    """
    ends = [member.process.sentinel for member in members if member.process.poll() is None]
    wait([end for end in ends if end is not None], timeout=seconds)


def end_all(members: Sequence[Member], grace_seconds: float) -> None:
    """End the processes of all members: first by SIGTERM, then by SIGKILL; return when none is left."""
    running = [member.process for member in members if member.process.poll() is None]
    for process in running:
        signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for process in running:
        process.wait(max(deadline - time.monotonic(), 0.0))
    for member in members:
        member.kill()  # data loader processes may outlive their rank
        member.process.wait(10.0)
        remove_temporary_folders(member.process.pid)
        stack = stack_path(member.log_path)
        with suppress(OSError):
            if stack.stat().st_size == 0:  # no stack was requested
                stack.unlink()


def environment_of(plan: Plan, rank: int) -> dict[str, str]:
    """Return the environment of a rank."""
    visible = environment_together(plan.devices_of(rank))
    configured = network_environment() | variables(plan.config.get("comm", {}).get("env"))
    return rank_environment(os.environ, visible, plan.threads[rank], package_root(), configured)


def package_root() -> str | None:
    """Return the folder from which other interpreters import hetexp; `None` if hetexp is installed.

    A site-packages folder must not be passed on, because this interpreter's torch is in it as well.
    """
    root = Path(hetexp.__file__).resolve().parent.parent
    return None if root.name in ("site-packages", "dist-packages") else str(root)

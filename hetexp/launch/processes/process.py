"""Starts a rank as a subprocess with its own interpreter, or as a fork of a server that has torch."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import hetexp
from hetexp.core.config import Config
from hetexp.hardware.backend import VISIBILITY, accelerators, driver_is_loaded
from hetexp.launch.environments.interpreter import RUN_WORKER, is_own
from hetexp.launch.processes.parent_death import die_with_parent, end_with_launcher
from hetexp.plan.exchange_checks import OTHER_JOBS

WORKER = "hetexp.worker"
"""A layer above this one, hence known by name only."""
PRELOADED: tuple[str, ...] = ("hetexp.launch.processes.preload", WORKER)
"""Modules that the fork server imports: all that a rank uses."""
CPU_BACKENDS = frozenset({"cpu", "emulated"})
LAUNCHER_PID = "HETEXP_LAUNCHER_PID"
CLUSTER_TOKEN = "HETEXP_CLUSTER_TOKEN"
"""Variable with the secret of a cluster's machines, which is removed from the environment of ranks."""
RUN_SECRET = "HETEXP_RUN_SECRET"
"""Variable of a rank with the secret of `hetexp.core.epoch.SignedStore`; no file and no log contains it."""


@dataclass(frozen=True)
class Start:
    """The parameters of a rank's process."""

    plan_path: Path
    rank: int
    interpreter: str
    environment: dict[str, str]
    working_dir: str
    log_path: Path
    member: int | None = None
    """Number of a member that joins a running training; `None` at a run's start."""
    store_port: int = 0
    """Port of the store on this machine."""
    checkpoint: str | None = None
    """Checkpoint from which the run goes on; another machine gets a copy."""

    @property
    def number(self) -> int:
        """Number of the member."""
        return self.rank if self.member is None else self.member


class RankProcess(Protocol):
    """A started rank."""

    @property
    def pid(self) -> int: ...

    @property
    def sentinel(self) -> int | None:
        """Descriptor that is ready once the process has ended, for `multiprocessing.connection.wait`."""
        ...

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or `None` while it runs."""
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Return when the process has ended or the time is over."""
        ...


class Elsewhere(ABC):
    """A rank of another machine (`hetexp.launch.processes.hosts`), which gets signals as messages."""

    pid = 2**31 - 1
    """A number that no process of this machine has, so that the kernel has no counts for it."""
    sentinel = None

    @abstractmethod
    def poll(self) -> int | None: ...

    @abstractmethod
    def wait(self, timeout_seconds: float) -> None: ...

    @abstractmethod
    def send(self, number: signal.Signals, group: bool) -> None:
        """Send a signal to the rank.

        Args:
            group: whether the processes that it started get the signal as well.
        """


class SubprocessRank:
    """A rank under its own interpreter, in a process group of its own.

    Its standard input is a pipe whose other end only the launcher holds (`end_with_launcher`).

    Args:
        process: that becomes the rank; `None`: a new one.
    """

    def __init__(self, start: Start, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process if process is not None else _popen(start)
        self._sentinel = _sentinel(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def sentinel(self) -> int | None:
        return self._sentinel

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if code is not None and self._sentinel is not None:
            os.close(self._sentinel)
            self._sentinel = None
        return code

    def wait(self, timeout_seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        self.poll()


def _popen(start: Start) -> subprocess.Popen[bytes]:
    arguments = ["--plan", str(start.plan_path), "--rank", str(start.rank)]
    if start.member is not None:
        arguments += ["--member", str(start.member)]
    return start_worker(start, arguments, start.environment, start.log_path)


def start_worker(
    start: Start, arguments: list[str], environment: Mapping[str, str], log_path: Path
) -> subprocess.Popen[bytes]:
    """Start the worker's program with a rank's interpreter and folder, in a session of its own."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [start.interpreter, "-c", RUN_WORKER, *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, LAUNCHER_PID: str(os.getpid())},
            cwd=start.working_dir,
            start_new_session=True,
        )


def start_fork_server() -> None:
    """Start the fork server, which imports everything while this process goes on, unless it runs already.

    It ends with this process, even if it still imports.
    """
    if not _fork_server_runs():
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
        atexit.register(_kill, forkserver)
    forkserver.ensure_running()


def _fork_server_runs() -> bool:
    server: Any = forkserver
    return server._forkserver._forkserver_pid is not None


def _kill(server: Any) -> None:
    with contextlib.suppress(OSError, TypeError):  # it has ended
        os.kill(server._forkserver._forkserver_pid, signal.SIGKILL)
        os.waitpid(server._forkserver._forkserver_pid, 0)


def import_ahead(config: Config, backends: Sequence[str] | None = None) -> None:
    """Let the fork server import what ranks need while this process checks and plans, if it will fork any.

    Args:
        backends: those of the selected devices; `None`: not known yet.
    """
    method = config.launch.start_method
    if backends is None:
        backends = [] if any(map(driver_is_loaded, accelerators())) else ["cpu"]
    forks = method == "auto" and not config.comm.env and any(may_fork([backend]) for backend in backends)
    if (forks or method == "forkserver") and not (config.plan_only or config.cluster.hosts):
        start_fork_server()


def may_fork(backends: Collection[str]) -> bool:
    """Return whether `launch.start_method=auto` forks ranks of some backends: those of the CPU, on Linux.

    A card's library may read its environment when it is imported, so that such a rank gets its own process.
    """
    return sys.platform == "linux" and CPU_BACKENDS.issuperset(backends)


class ForkedRank:
    """A rank forked from multiprocessing's fork server, which has imported torch once for all of them."""

    def __init__(self, start: Start) -> None:
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        self._process: BaseProcess = context.Process(target=_forked, args=(start,), daemon=False)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int | None:
        return self._process.sentinel

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_seconds: float) -> None:
        self._process.join(timeout_seconds)


def start_rank(start: Start, method: str) -> RankProcess:
    """Start a rank as a fork or a subprocess.

    A rank is not forked if it has another interpreter, or if the fork server would import another hetexp.

    Raises:
        OSError: the process cannot start, or the disk has no room for its log.
    """
    start.log_path.open("ab").close()
    return ForkedRank(start) if forks(start.interpreter, method) else SubprocessRank(start)


def forks(interpreter: str, method: str) -> bool:
    """Return whether ranks with an interpreter are forked.

    Args:
        method: `launch.start_method`; with `auto` only if the fork server runs.
    """
    wanted = method == "forkserver" or (method == "auto" and _fork_server_runs())
    return wanted and is_own(interpreter) and _forks_import_this_hetexp()


def _forks_import_this_hetexp() -> bool:
    """Return whether the fork server imports this hetexp, since it searches the current folder first."""
    spec = PathFinder.find_spec("hetexp", [str(Path.cwd())])
    if spec is None or spec.origin is None:  # a plain folder of this name hides nothing
        return True
    return Path(spec.origin).resolve() == Path(hetexp.__file__).resolve()


def _sentinel(pid: int) -> int | None:
    """Return a descriptor that is ready once a process has ended; `None` on other systems than Linux."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def signal_group(process: RankProcess | subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a rank and all processes that it started, even if the rank itself has ended."""
    if isinstance(process, Elsewhere):
        process.send(number, group=True)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def signal_rank(process: RankProcess, number: signal.Signals) -> None:
    """Send a signal to a rank alone."""
    if isinstance(process, Elsewhere):
        process.send(number, group=False)
        return
    with contextlib.suppress(OSError):
        os.kill(process.pid, number)


def rank_environment(
    inherited: Mapping[str, str],
    device: Mapping[str, str],
    threads: int,
    package_root: str | None,
    configured: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return a rank's environment: the launcher's, without the variables of another engine's job.

    Args:
        inherited: the launcher's environment; NCCL's and the vendor's settings pass unchanged.
        device: the backend's visibility variables.
        package_root: folder to import hetexp from, if the rank's interpreter does not have it.
        configured: variables of the configuration (`comm.env`).
    """
    # An inherited mask would apply on top of the rank's own.
    removed = {*OTHER_JOBS, *VISIBILITY, CLUSTER_TOKEN}
    environment = {key: value for key, value in inherited.items() if key not in removed}
    environment |= {**(configured or {}), **device}
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONUNBUFFERED"] = "1"
    # One host: otherwise gloo resolves the host's own name, which may lead anywhere.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if package_root is not None:
        environment["PYTHONPATH"] = python_path(package_root, environment)
    return environment


def python_path(package_root: str, environment: Mapping[str, str]) -> str:
    """Return the value of PYTHONPATH in an environment, with the folder of hetexp first."""
    inherited = environment.get("PYTHONPATH")
    return os.pathsep.join([package_root, inherited] if inherited else [package_root])


def _forked(start: Start) -> None:
    """Set the forked child up like a subprocess, then run the rank."""
    os.setsid()
    log = os.open(start.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.working_dir)
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_launcher(lambda: wait([parent.sentinel]))
    # Data loaders start their processes in Python's default way, as in a rank that is a subprocess.
    multiprocessing.set_start_method(None, force=True)
    _let_fork_server_end()
    die_with_parent(os.getppid())
    pkgutil.resolve_name(f"{WORKER}:run_rank")(start.plan_path, start.rank, start.member)


def _let_fork_server_end() -> None:
    """Close the pipe by which a child keeps the fork server alive, so that the server ends with the launcher.

    Otherwise a rank that is stopped or hangs keeps its parent alive, the server, and so itself.
    """
    server: Any = forkserver
    alive, server._forkserver._forkserver_alive_fd = server._forkserver._forkserver_alive_fd, None
    if alive is not None:
        os.close(alive)

"""Runs started by a fork of this process, which has imported all that they need, and found by their parents.

The process that starts them adopts what they leave (Linux: child subreaper), so that nothing escapes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import hetexp.launch.processes.preload
import hetexp.training.loop
import hetexp.training.measuring.result
import hetexp.training.measuring.warmup_calibration
import hetexp.training.wiring
import hetexp.worker  # noqa: F401
from chaos_lab.parts import ORDER, RECORDS, rank_by_log
from hetexp.app import compose_config, run
from hetexp.core.errors import HetexpError, RunFailedError
from hetexp.plan.run_spec import Request

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
NO_CONFIG, CRASHED = 2, 70
"""Exit codes of a launcher that could not start a run, and of one that raised what it should not."""
SCRIPTS = Path(__file__).resolve().parent.parent


def adopt_orphans() -> None:
    """Become the parent of whatever descendants of this process lose theirs."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system cannot let a process adopt orphans")


def descendants(pid: int) -> list[int]:
    """Return all living processes below one, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - as quick as can be
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                state, parent = file.read().rpartition(b") ")[2].split(None, 2)[:2]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(entry))
    found, new = [], [pid]
    while new:
        below = children.get(new.pop(), [])
        found += below
        new += below
    return found


class Job:
    """One run under way.

    Args:
        folder: of the run, new.
        beside: folder for its screen and records; by default the one that `folder` is in.
        overrides: of the configuration; composed once for each set of them.
        order: what the model's marks report (`parts.Watch`).
        environment: variables to set.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        order: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        beside: Path | None = None,
    ) -> None:
        self.folder = folder
        beside = beside or folder.parent
        self.records = beside / f"{folder.name}.records"
        self.records.mkdir(parents=True)
        self.screen_path = beside / f"{folder.name}.screen.txt"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = str(beside / f"{folder.name}.s")
        self._socket.bind(address)
        variables = {
            RECORDS: str(self.records),
            ORDER: json.dumps({**(order or {}), "socket": address}),
            **(environment or {}),
        }
        self.started = time.monotonic()
        self.code: int | None = None
        """Exit code of the launcher, negative for a signal."""
        self.ended = 0.0
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._launch(overrides, variables)

    def _launch(self, overrides: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
        code = CRASHED
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._socket.close()
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            screen = os.open(self.screen_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(screen, 1)
            os.dup2(screen, 2)
            os.environ.update(variables)
            sys.path[0] = str(SCRIPTS)
            code = _run(self.folder, overrides)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """Return the launcher's exit code, `None` while it runs; take in orphans that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self.code
            if pid == 0:
                return self.code
            if pid == self.pid:
                self.code, self.ended = os.waitstatus_to_exitcode(status), time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Return whether the launcher ended within so many seconds from now."""
        return until(lambda: self.poll() is not None, seconds)

    def arrival(self, seconds: float) -> int | None:
        """Return the process that came to the ordered place, `None` where none did while the run went on."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            if select.select([self._socket], [], [], 0.02)[0]:
                return int(self._socket.recv(64))
        return None

    def ranks(self) -> dict[int, int]:
        """Return the processes of the ranks by rank: the leaders of their groups."""
        found = {}
        for pid in descendants(self.pid):
            with contextlib.suppress(OSError):
                rank = rank_by_log(pid)
                if rank is not None and os.getpgid(pid) == pid:
                    found[rank] = pid
        return found

    def training(self) -> bool:
        """Tell whether a rank has finished a step."""
        return any(self.records.iterdir())

    @property
    def screen(self) -> str:
        return self.screen_path.read_text(errors="replace") if self.screen_path.exists() else ""

    def close(self) -> None:
        """End whatever is left of it, and take it in."""
        self._socket.close()
        for pid in descendants(os.getpid()):
            kill(pid)
        until(lambda: self.poll() is not None and not descendants(os.getpid()), 10.0)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal, and tell whether the process was there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def until(condition: Callable[[], bool], seconds: float, pause: float = 0.005) -> bool:
    """Ask again and again until it is so, and tell whether it came to that in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _run(folder: Path, overrides: Sequence[str]) -> int:
    """Do what `python train.py` does, and return its exit code."""
    from rich.console import Console

    with _fork_server():
        try:
            run(
                compose_config(overrides),
                Request(folder, Path.cwd(), overrides=tuple(overrides)),
                Console(width=160),
            )
        except RunFailedError as error:
            print(error)
            return error.exit_code
        except HetexpError as error:
            print(f"{type(error).__name__}: {error}")
            return NO_CONFIG
    return 0


@contextlib.contextmanager
def _fork_server() -> Iterator[None]:
    """Fork the fork server of multiprocessing: a server that multiprocessing starts imports torch again."""
    server: Any = forkserver._forkserver
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        listener.listen()
        theirs, alive = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(alive)
                forkserver.main(os.dup(listener.fileno()), theirs, [])
            finally:
                os._exit(0)
        os.close(theirs)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, pid
    try:
        yield
    finally:
        os.close(alive)
        os.waitpid(pid, 0)
        for one in Path(address).parent.glob("*"):
            one.unlink(missing_ok=True)

"""The launcher's side of the monitor: it starts a process beside the launcher and sends it messages.

It is a process, not a thread: a driver's library can hang or crash, and imports and queries take the
interpreter lock, which the launcher needs when a rank dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hetexp
from hetexp.core.config import Config, MonitorConfig
from hetexp.core.errors import SetupError
from hetexp.core.plan import Plan

END_SECONDS = 5.0
"""Longest wait for the process to record the end of the run."""
LOG = "monitor.log"
"""Name of the log in the run's folder of logs; written only if something goes wrong."""
_RUN = "import sys; sys.path = [p for p in sys.path if p]; from hetexp.monitor.main import main; main()"


class Follower:
    """Sends the launcher's messages to the process beside it, if there is one."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process

    def ready(self, steps: int) -> None:
        """Report that all ranks train, and the number of steps; 0: only the user's script knows it."""
        self._send({"steps": steps})

    def end(self, error: BaseException | None) -> None:
        """Report the end of the run, and wait until the process has recorded it."""
        self._send({"end": True, "error": str(error) or type(error).__name__ if error is not None else None})
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # it is gone: the run goes on
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()


@contextmanager
def followed(plan: Plan, config: Config) -> Iterator[Follower]:
    """Let a process beside this one sample the devices and record the run, for the time of the context.

    Raises:
        SetupError: `monitor.url` names a database whose driver is not installed.
    """
    if plan.measuring or not config.monitor.enabled or not can_follow(config.monitor):
        yield Follower()
        return
    follower = Follower(_start(plan, config.monitor))
    try:
        yield follower
    except BaseException as error:
        follower.end(error)
        raise
    follower.end(None)


def can_follow(config: MonitorConfig) -> bool:
    """Return whether the monitor's libraries are installed.

    Raises:
        SetupError: a library is missing, and the user has named a database.
    """
    missing = "SQLAlchemy" if find_spec("sqlalchemy") is None else None
    extra = "monitor"
    if missing is None and (config.url or "").startswith("postgresql") and find_spec("psycopg") is None:
        missing, extra = "psycopg", "postgres"
    if missing is not None and config.url is not None:
        raise SetupError(
            f"`monitor.url` names a database, but {missing}, which reaches it, is not installed; run: "
            f"pip install 'hetexp[{extra}]', or do without (monitor=none)."
        )
    return missing is None


def _start(plan: Plan, config: MonitorConfig) -> subprocess.Popen[bytes] | None:
    order = {
        "monitor": config.model_dump(mode="json"),
        "plan": str(Path(plan.run_dir) / "plan.json"),
        "log": str(Path(plan.run_dir) / "logs" / LOG),
        "pid": os.getpid(),
        "created": time.time(),
    }
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _RUN, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_paths())},
            start_new_session=True,  # Ctrl-C is the launcher's: the end is reported after it
        )
    except OSError:  # the run goes on without the process
        return None


def _import_paths() -> list[str]:
    """Return the import paths of the process: hetexp's own unless it is installed, then those of the user."""
    root = Path(hetexp.__file__).resolve().parent.parent
    package = [] if root.name in ("site-packages", "dist-packages") else [str(root)]
    return [*package, *filter(None, [os.environ.get("PYTHONPATH")])]

"""What a rank leaves behind when it fails, and which of several failures was the first cause."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hetexp.core.files import no_room, write_json

NO_ROOM = 74
"""Exit code (EX_IOERR of sysexits.h) of a rank that a full disk ended, and kept from writing so."""


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ended."""

    rank: int
    kind: str
    """Class of the error, or the signal's name."""
    message: str
    """What went wrong, for people; a traceback where the error was not foreseen."""
    step: int | None = None
    peer_lost: bool = False
    """The rank only noticed that another one was gone."""
    time: float = 0.0
    """Seconds since the epoch."""


def log_path(run_dir: Path, member: int) -> Path:
    """Return the log of a member; those that a run begins with are numbered as its ranks."""
    return run_dir / "logs" / f"rank_{member}.log"


def stack_path(log_path: Path) -> Path:
    """Return where the rank with this log writes its stack when it is asked for it."""
    return log_path.with_suffix(".stack")


def failure_path(log_path: Path) -> Path:
    """Return where the rank with this log writes its failure."""
    return log_path.with_suffix(".failure.json")


def write_failure(log_path: Path, failure: RankFailure) -> None:
    """Write the failure beside the rank's log; others wait for its end, and for no disk."""
    write_json(failure_path(log_path), asdict(failure), durable=False)


def read_failure(log_path: Path, rank: int, exit_code: int) -> RankFailure:
    """Return why a rank ended with an exit code other than 0, from what it wrote or from how it ended."""
    path = failure_path(log_path)
    if path.exists():
        return RankFailure(**json.loads(path.read_text(encoding="utf-8")))
    if exit_code == NO_ROOM:
        error = no_room(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), log_path.parent.parent)
        return RankFailure(rank, "OSError", str(error), time=time.time())
    end = tail(log_path)
    kind = signal_name(-exit_code) if exit_code < 0 else f"exit code {exit_code}"
    how = "killed by" if exit_code < 0 else "ended with"
    last = end.splitlines()[-1].strip()
    message = f"End of its log:\n{end}\n{how} {kind}; the last it said: {last}"
    return RankFailure(rank, kind, message, time=time.time())


def tail(log_path: Path) -> str:
    """Return the last lines of a rank's log."""
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines() if log_path.exists() else []
    return "\n".join(lines[-30:]) or "(its log is empty)"


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; a number that has no name, as a real-time signal's, stays a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(failures: list[RankFailure]) -> RankFailure:
    """Return the failure that explains the others.

    A rank that lost a peer did not cause anything, whoever reported first.
    """
    return min(failures, key=lambda f: (f.peer_lost, f.time))

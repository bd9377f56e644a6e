"""The failure of a rank: its file beside the log, and the first cause of several failures."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hetexp.core.files import no_room, write_json

NO_ROOM = 74
"""Exit code (EX_IOERR of sysexits.h) of a rank that a full disk ended, so that it wrote no failure."""


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ended."""

    rank: int
    kind: str
    """Class of the error, or name of the signal."""
    message: str
    """Message of the error; a traceback for an error that is not hetexp's own."""
    step: int | None = None
    peer_lost: bool = False
    """Whether the rank only noticed that another rank was gone."""
    time: float = 0.0
    """Seconds since 1970."""

    @property
    def reason(self) -> str:
        """The line of the message that says most: of a traceback, the error with its message's first line.

        Many of torch's messages go on with pages of listings.
        """
        lines = self.message.strip().splitlines() or [self.kind]
        if not lines[0].startswith("Traceback "):
            return lines[-1].strip()
        error = re.compile(rf"(\w+\.)*{re.escape(self.kind)}(: |$)")
        return next((line.strip() for line in reversed(lines) if error.match(line)), lines[-1].strip())


def log_path(run_dir: Path, member: int) -> Path:
    """Return the log of a member; the first members have the numbers of their ranks."""
    return run_dir / "logs" / f"rank_{member}.log"


def stack_path(log_path: Path) -> Path:
    """Return where the rank with this log writes its stack on request."""
    return log_path.with_suffix(".stack")


def traceback_path(log_path: Path) -> Path:
    """Return where the rank with this log writes the traceback of an error whose message says it all."""
    return log_path.with_suffix(".traceback")


def failure_path(log_path: Path) -> Path:
    """Return where the rank with this log writes its failure."""
    return log_path.with_suffix(".failure.json")


def write_failure(log_path: Path, failure: RankFailure) -> None:
    """Write the failure beside the rank's log, without waiting for the disk."""
    write_json(failure_path(log_path), asdict(failure), durable=False)


def read_failure(log_path: Path, rank: int, exit_code: int) -> RankFailure:
    """Return why a rank ended with an exit code other than 0, from its file or from the exit code."""
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
    """Return `SIGKILL` for 9, and `signal 40` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(failures: list[RankFailure]) -> RankFailure:
    """Return the first failure of a rank that did not merely lose a peer; of such ranks only, the first."""
    return min(failures, key=lambda f: (f.peer_lost, f.time))

"""One training that the server starts: its files, and its process.

The run folder has all facts, so that a server that was killed finds its trainings again: `job.json` has the
request, and `job.lock` is held while the launcher lives. The server takes the lock before it starts the
launcher, which inherits the open file. So the lock shows at every moment whether the launcher runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import hetexp
from hetexp.core.device import DeviceSpec
from hetexp.core.files import read_json, write_json
from hetexp.hardware.detection.lease import holder

NOTE, LOCK = "job.json", "job.lock"
RUNS = "outputs"
"""Folder of runs below the server's working folder."""
LOG = Path("logs") / "launcher.log"
_TAIL_BYTES = 64 * 1024
PROCESSOR = "this machine's processor"
"""The resource that CPU ranks and emulated devices take: trainings that share it slow each other."""


@dataclass(frozen=True)
class Card:
    """The identity of a real card, in a run and in leases."""

    id: str
    backend: str
    uuid: str | None = None
    pci: str | None = None

    @property
    def spec(self) -> DeviceSpec:
        """The card in the form that leases take."""
        return DeviceSpec(self.id, self.backend, 0, self.id, "", uuid=self.uuid, pci=self.pci)


@dataclass(frozen=True)
class Job:
    """A requested training."""

    id: str
    root: str
    """The server's working folder."""
    folder: str
    """Run folder below `root`: `outputs/2026-01-31/12-00-00-0a1b2c`."""
    words: tuple[str, ...]
    """Words of `hetexp train`."""
    name: str
    monitor_url: str | None
    """Database for its progress."""
    gpu_ids: tuple[str, ...]
    cards: tuple[Card, ...]
    """The real cards among the devices."""
    overrides: dict[str, Any] = field(default_factory=dict)
    experiment: str | None = None
    balancing: str | None = None
    stop_asked: float | None = None
    """Time of the request to end, in seconds since the epoch."""

    @property
    def takes(self) -> set[str]:
        """Cards, and the processor, that no other training may use at the same time."""
        real = {card.id for card in self.cards}
        return real | ({PROCESSOR} if len(self.cards) < len(self.gpu_ids) else set())

    def held(self) -> list[str]:
        """Return a text for each of its cards that another run holds."""
        return [f"{card.id}: {text}" for card in self.cards if (text := holder(card.spec)) is not None]

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.root) / self.folder

    def write(self) -> None:
        """Write `job.json` into the run folder."""
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_json(self.run_dir / NOTE, asdict(self))

    def stopping(self, now: float) -> Job:
        """Save the job with the time of the request to end, and return it."""
        asked = replace(self, stop_asked=now)
        asked.write()
        return asked


_JOB = TypeAdapter(Job)


def read_job(run_dir: Path) -> Job | None:
    """Return the job of a run folder, `None` if no server started it."""
    try:
        return _JOB.validate_python(read_json(run_dir / NOTE))
    except (OSError, ValueError):
        return None


def own_job(row: Mapping[str, Any], root: Path) -> Job | None:
    """Return the job of a training that a server of this user has put below `root`, `None` for any other one.

    Who may write the database may name any folder in a row, and a job starts code.
    """
    try:
        run_dir = Path(row["run_dir"]).resolve(strict=True)
        owners = {run_dir.stat().st_uid, (run_dir / NOTE).lstat().st_uid}
    except (OSError, ValueError, RuntimeError):  # a null byte, a circle of links
        return None
    if owners != {os.getuid()} or not run_dir.is_relative_to((root / RUNS).resolve()):
        return None
    job = read_job(run_dir)
    return job if job is not None and job.id == row["id"] else None


def alive(run_dir: Path) -> bool:
    """Return whether the launcher of a job lives."""
    try:
        descriptor = _locked(run_dir)
    except OSError:
        return False
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _locked(run_dir: Path, flags: int = 0) -> int | None:
    """Open a job's lock and take it; `None` if its launcher has it.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def has_begun(run_dir: Path) -> bool:
    """Return whether a job's launcher has written a plan, a summary or a line of its log."""
    if (run_dir / "plan.json").exists() or (run_dir / "summary.json").exists():
        return True
    with contextlib.suppress(OSError):
        return (run_dir / LOG).stat().st_size > 0
    return False


def launch(job: Job) -> subprocess.Popen[bytes] | None:
    """Start a job's launcher in a new session; return `None` if it runs already.

    Raises:
        OSError: no process can be started.
    """
    run_dir = job.run_dir
    descriptor = _locked(run_dir, os.O_CREAT)
    if descriptor is None:
        return None
    try:
        with (run_dir / LOG).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "hetexp.cli", "train", *job.words, *_server_words(job)],
                cwd=job.root,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C and a closed terminal end the server only
                pass_fds=(descriptor,),
            )
    finally:
        os.close(descriptor)


def _server_words(job: Job) -> list[str]:
    """Return the words that the server adds to those of the request."""
    url = "null" if job.monitor_url is None else _quoted(job.monitor_url)
    return [
        f"hydra.run.dir={job.folder}",
        f"name={_quoted(job.name)}",
        "monitor.enabled=true",
        f"monitor.url={url}",
    ]


def _quoted(text: str) -> str:
    """Return a text in quotes for Hydra, with quotes and the backslashes before them escaped."""
    return "'" + re.sub(r"(\\*)('|$)", lambda quote: quote[1] * 2 + quote[2].replace("'", "\\'"), text) + "'"


def signalled(pid: int, number: signal.Signals, group: bool = False) -> None:
    """Send a signal to a launcher, or to its process group, if it still exists.

    Raises:
        PermissionError: the process is another user's.
    """
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def log_tail(run_dir: Path, lines: int) -> list[str]:
    """Return the last lines of a launcher's output, or of rank 0's log without such an output."""
    for path in (run_dir / LOG, run_dir / "logs" / "rank_0.log"):
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        whole = text if size <= _TAIL_BYTES else text.partition("\n")[2]
        last = whole.splitlines()[-lines:]
        return ["".join(c for c in line if c.isprintable() or c == "\t") for line in last]
    return []


def environment() -> dict[str, str]:
    """Return the server's environment without its token, and with a path to the same hetexp."""
    package = Path(hetexp.__file__).resolve().parent.parent
    checkout = [] if package.name in ("site-packages", "dist-packages") else [str(package)]
    paths = [*checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "HETEXP_DASHBOARD_TOKEN"}
    variables = {"COLUMNS": "120", **kept}
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)} if paths else variables

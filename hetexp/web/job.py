"""One training that the server starts: what its folder says of it, and its process.

The folder tells everything, so that a server that was killed finds its trainings again: `job.json` what was
asked, `job.lock` whether its launcher lives. The lock is taken before the launcher is started, which holds it
by inheriting the open file: the lock shows at every moment whether it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import hetexp
from hetexp.core.device import DeviceSpec
from hetexp.core.files import write_json
from hetexp.hardware.detection.lease import holder

NOTE, LOCK = "job.json", "job.lock"
LOG = Path("logs") / "launcher.log"
PROCESSOR = "this machine's processor"
"""What devices whose work it does take: trainings that share it slow each other."""


@dataclass(frozen=True)
class Card:
    """The facts that identify a real card, in a run and in leases."""

    id: str
    backend: str
    uuid: str | None = None
    pci: str | None = None

    @property
    def spec(self) -> DeviceSpec:
        """The same as leases take it."""
        return DeviceSpec(self.id, self.backend, 0, self.id, "", uuid=self.uuid, pci=self.pci)


@dataclass(frozen=True)
class Job:
    """A training that a request asked for."""

    id: str
    root: str
    """The folder that the server was started in."""
    folder: str
    """Of the run, below it: `outputs/2026-01-31/12-00-00-0a1b2c`."""
    words: tuple[str, ...]
    """For `hetexp train`."""
    name: str
    monitor_url: str | None
    """Of the database that it tells its progress."""
    gpu_ids: tuple[str, ...]
    cards: tuple[Card, ...]
    """The real ones among the devices."""
    overrides: dict[str, Any] = field(default_factory=dict)
    experiment: str | None = None
    balancing: str | None = None
    stop_asked: float | None = None
    """When it was asked to end; seconds since the epoch."""

    @property
    def takes(self) -> set[str]:
        """What no other training may use at the same time."""
        real = {card.id for card in self.cards}
        return real | ({PROCESSOR} if len(self.cards) < len(self.gpu_ids) else set())

    def held(self) -> list[str]:
        """Return which of its cards another run holds, in words."""
        return [f"{card.id}: {text}" for card in self.cards if (text := holder(card.spec)) is not None]

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.root) / self.folder

    def write(self) -> None:
        """Write it into its folder."""
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_json(self.run_dir / NOTE, asdict(self))

    def stopping(self, now: float) -> Job:
        """Return the job with the time at which its end was requested, and save it."""
        asked = replace(self, stop_asked=now)
        asked.write()
        return asked


def read_job(run_dir: Path) -> Job | None:
    """Return the job of a run folder, `None` if no server started it."""
    try:
        raw = json.loads((run_dir / NOTE).read_text(encoding="utf-8"))
        cards = tuple(Card(**card) for card in raw.pop("cards"))
        return Job(**raw | {"cards": cards, "words": tuple(raw["words"]), "gpu_ids": tuple(raw["gpu_ids"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    """Return whether the launcher of a job has come far enough to leave something."""
    if (run_dir / "plan.json").exists() or (run_dir / "summary.json").exists():
        return True
    with contextlib.suppress(OSError):
        return (run_dir / LOG).stat().st_size > 0
    return False


def launch(job: Job) -> subprocess.Popen[bytes] | None:
    """Start a job's launcher, in a session of its own; `None`: it runs already.

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
                [sys.executable, "-m", "hetexp.cli", "train", *job.words, *_of_the_server(job)],
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


def _of_the_server(job: Job) -> list[str]:
    """Return the words that the request has no part in."""
    url = "null" if job.monitor_url is None else _quoted(job.monitor_url)
    return [
        f"hydra.run.dir={job.folder}",
        f"name={_quoted(job.name)}",
        "monitor.enabled=true",
        f"monitor.url={url}",
    ]


def _quoted(text: str) -> str:
    """Return a text as Hydra reads it back: in quotes only these matter, and backslashes before them."""
    return "'" + re.sub(r"(\\*)('|$)", lambda quote: quote[1] * 2 + quote[2].replace("'", "\\'"), text) + "'"


def signalled(pid: int, number: signal.Signals, group: bool = False) -> None:
    """Send a signal to a launcher, or to all of its group; one that is gone needs none.

    Raises:
        PermissionError: it is another user's.
    """
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def log_tail(run_dir: Path, lines: int, most_bytes: int = 64 * 1024) -> list[str]:
    """Return the last lines of a launcher's output, or of rank 0's log if the output was not kept."""
    for path in (run_dir / LOG, run_dir / "logs" / "rank_0.log"):
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - most_bytes))
                text = file.read(most_bytes).decode("utf-8", "replace")
        except OSError:
            continue
        whole = text if size <= most_bytes else text.partition("\n")[2]
        return ["".join(c for c in line if c.isprintable() or c == "\t") for line in whole.splitlines()][
            -lines:
        ]
    return []


def environment() -> dict[str, str]:
    """Return the server's environment without its secrets, in which the same hetexp is found."""
    package = Path(hetexp.__file__).resolve().parent.parent
    checkout = [] if package.name in ("site-packages", "dist-packages") else [str(package)]
    paths = [*checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "HETEXP_DASHBOARD_TOKEN"}
    variables = {"COLUMNS": "120", **kept}
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)} if paths else variables

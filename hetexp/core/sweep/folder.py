"""A sweep's folder: its name, its jobs' folders, and `sweep.jsonl` with a row for each ended run."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from hetexp.core.files import parse_json

SWEEP_FILE = "sweep.jsonl"
SWEEP_NOTE = "sweep.json"
SWEEPS = Path("outputs/sweeps")
"""Folder of all sweeps below the working folder, as in `conf/config.yaml`."""
_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*")


@dataclass(frozen=True)
class SweepRow:
    """How one run of a sweep ended."""

    job: int
    """Hydra's number of the job."""
    overrides: tuple[str, ...]
    """Sorted overrides of this run, the key of its row."""
    folder: str
    """Name of the run's folder, below the sweep's."""
    status: str
    """`completed`, `failed`, `interrupted`, or `refused` if its configuration kept it from starting."""
    error: str | None
    started_at: str
    """ISO 8601, UTC."""
    seconds: float
    """From composing to the end, calibration, start-up and waiting for devices included."""


def append_row(sweep: Path, row: SweepRow) -> None:
    """Add a row to a sweep's file; jobs of several processes may do so at the same time."""
    path = sweep / SWEEP_FILE
    with FileLock(sweep / f".{SWEEP_FILE}.lock"), path.open("ab+") as file:
        begins = ""
        if file.tell():
            file.seek(-1, os.SEEK_END)
            begins = "" if file.read(1) == b"\n" else "\n"  # half a line that a kill left stays alone
        file.write(f"{begins}{json.dumps(asdict(row))}\n".encode())
        file.flush()


def read_rows(sweep: Path, size: int | None = None) -> list[SweepRow]:
    """Return the rows of a sweep's runs, by job.

    A later attempt with the same overrides replaces one that did not complete. All completed runs count, even
    equal ones. Half a line that a kill left is no row.

    Args:
        size: bytes of the file that are read; by default all.
    """
    path = sweep / SWEEP_FILE
    if not path.is_file():
        return []
    by_folder: dict[str, SweepRow] = {}
    unfinished_folder: dict[tuple[str, ...], str] = {}
    for line in path.read_bytes()[:size].splitlines():
        try:
            raw: dict[str, Any] = parse_json(line)
            row = SweepRow(**raw | {"overrides": tuple(raw["overrides"])})
            texts = (*row.overrides, row.folder, row.status, row.error or "")
            if not isinstance(row.job, int) or not all(isinstance(text, str) for text in texts):
                continue
        except (ValueError, TypeError, KeyError):
            continue
        by_folder.pop(unfinished_folder.pop(row.overrides, ""), None)
        by_folder[row.folder] = row
        if row.status != "completed":
            unfinished_folder[row.overrides] = row.folder
    return sorted(by_folder.values(), key=lambda row: row.job)


def read_note(sweep: Path) -> dict[str, Any]:
    """Return `sweep.json`, the command line of each start; empty if there is none that can be read."""
    try:
        note = json.loads((sweep / SWEEP_NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def last_start(sweep: Path) -> dict[str, Any]:
    """Return the entry of `sweep.json` for the newest start of the sweep; empty if there is none."""
    note = read_note(sweep)
    last: dict[str, Any] = note.get("continued", [note])[-1]
    return last


def key_of(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides of a job as the key of its row.

    Their order, and the overrides of Hydra and of the sweep, do not matter.
    """
    return tuple(sorted(of_a_run(overrides)))


def of_a_run(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides without Hydra's own and the sweep's."""
    others = ("hydra.", "hydra/", "sweep.")
    return tuple(text for text in overrides if not text.lstrip("+~").startswith(others))


def completed_row(sweep: Path, overrides: Iterable[str]) -> SweepRow | None:
    """Return the row of a run with these overrides that completed before the sweep was started (again).

    Its folder still exists. A run that one start asks for twice runs twice.
    """
    key = key_of(overrides)
    for row in read_rows(sweep, last_start(sweep).get("rows_bytes")):
        if row.overrides == key and row.status == "completed" and (sweep / row.folder).is_dir():
            return row
    return None


def job_folder(sweep: Path, number: int, overrides: Iterable[str]) -> str:
    """Return the name of a job's folder: its number, or `<number>-2` and so on if that is taken.

    An earlier attempt keeps its folder, and a number may mean another run than before. A completed run has
    its old folder.
    """
    done = completed_row(sweep, overrides)
    if done is not None:
        return done.folder
    name, attempt = str(number), 1
    while (sweep / name).exists():
        attempt += 1
        name = f"{number}-{attempt}"
    return name


def new_name() -> str:
    """Return a unique name, made of the time."""
    return f"{datetime.now():%H-%M-%S}-{secrets.token_hex(3)}"


def sweep_name(name: str | None) -> str:
    """Return `sweep.name`, or for `None` a new name, made of date and time."""
    return name if name is not None else f"{datetime.now():%Y-%m-%d}/{new_name()}"


def name_problem(name: object) -> str:
    """Return what the name of a sweep must be; empty if this is one."""
    if isinstance(name, str) and _NAME.fullmatch(name) and not {".", ".."} & set(name.split("/")):
        return ""
    return "null, or a name of letters, digits, '.', '-' and '_', with '/' between folders"


def unfinished(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the rows of runs that did not complete."""
    return [row for row in rows if row.status != "completed"]

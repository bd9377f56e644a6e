"""`sweep.jsonl`: one row a run of a sweep, in the order in which they ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

SWEEP_FILE = "sweep.jsonl"


@dataclass(frozen=True)
class SweepRow:
    """How one run of a sweep ended."""

    job: int
    """Hydra's number of the job."""
    overrides: tuple[str, ...]
    """What makes this run another one than its neighbours, sorted: the key of the row."""
    folder: str
    """Name of the run's folder, below the sweep's."""
    status: str
    """`completed`, `failed`, `interrupted`, or `refused` where its configuration kept it from starting."""
    error: str | None
    started_at: str
    """ISO 8601, UTC."""
    seconds: float
    """From composing to the end, calibration and start-up included."""


def append_row(sweep: Path, row: SweepRow) -> None:
    """Add a row to a sweep's file; jobs of several processes may do so at the same time."""
    path = sweep / SWEEP_FILE
    with FileLock(sweep / f".{SWEEP_FILE}.lock"), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")
        file.flush()


def read_rows(sweep: Path) -> list[SweepRow]:
    """Return the newest row of each run, by job; half a line that a kill left is no row."""
    path = sweep / SWEEP_FILE
    if not path.exists():
        return []
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            raw: dict[str, Any] = json.loads(line)
            row = SweepRow(**raw | {"overrides": tuple(raw["overrides"])})
        except (ValueError, TypeError, KeyError):
            continue
        rows[row.overrides] = row
    return sorted(rows.values(), key=lambda row: row.job)


def key_of(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides of a job as the key of its row: neither their order nor Hydra's own matter."""
    return tuple(sorted(text for text in overrides if not text.lstrip("+~").startswith("hydra")))


def unfinished(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the rows of runs that did not complete."""
    return [row for row in rows if row.status != "completed"]

"""What run folders hold, read back for a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hetexp.core.errors import ConfigError, must_be
from hetexp.core.plan import Plan
from hetexp.core.sweep import SWEEP_FILE, SweepRow, read_rows

SUMMARY, PLAN, METRICS = "summary.json", "plan.json", "metrics.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """One run as its folder tells it."""

    folder: Path
    summary: dict[str, Any]
    """`summary.json`; of a run that never started or was killed, its `status` and `error` alone."""
    plan: Plan | None
    """None where the run's configuration was refused."""
    overrides: tuple[str, ...] = ()
    """What the person typed, or the sweep chose."""
    row: SweepRow | None = None
    """Of a sweep's run."""

    @property
    def status(self) -> str:
        """`completed`, `failed`, `interrupted`, `refused`, or `unfinished` where nothing tells the end."""
        return str(self.summary["status"])

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    @property
    def scale(self) -> float:
        """Wall-clock seconds a modelled second; 1 where no device is paced."""
        return float(self.summary.get("time_scale") or 1.0)

    @property
    def seed(self) -> int | None:
        return self.summary.get("seed")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; of a step that a resumed run repeated, the later ones."""
        path = self.folder / METRICS
        return list(_metrics(path)) if path.exists() else []


def read_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """Return all runs in these folders and below them, a sweep's in the order of its jobs.

    Of several attempts at one run of a sweep only the newest is returned.

    Raises:
        ConfigError: a path is no folder, or there is no run in any of them.
    """
    paths = list(paths)
    problems = [must_be("RUN", "a run folder or one above it", str(p)) for p in paths if not p.is_dir()]
    if problems:
        raise ConfigError(problems)
    found: dict[Path, RunRecord] = {}
    for path in paths:
        for run in _below(path.resolve()):
            found.setdefault(run.folder, run)
    if not found:
        where = ", ".join(map(str, paths))
        raise ConfigError(must_be("RUN", "a folder with runs in it (each has a plan.json)", where))
    return list(found.values())


def _below(path: Path) -> Iterator[RunRecord]:
    if (path / SWEEP_FILE).exists():
        yield from (_of_row(path, row) for row in read_rows(path))
        return
    if (path / PLAN).exists():
        yield _read(path)
        return
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.name.startswith("."):
            yield from _below(child)


def _of_row(sweep: Path, row: SweepRow) -> RunRecord:
    folder = sweep / row.folder
    if (folder / PLAN).exists():
        return _read(folder, row)
    return RunRecord(folder, {"status": row.status, "error": row.error}, None, row.overrides, row)


def _read(folder: Path, row: SweepRow | None = None) -> RunRecord:
    plan = Plan.read(folder / PLAN)
    path = folder / SUMMARY
    if path.exists():
        summary = json.loads(path.read_text(encoding="utf-8"))
    else:
        summary = {"status": "unfinished", "error": "it has no summary: it is running, or was killed"}
    return RunRecord(folder, summary, plan, plan.overrides if row is None else row.overrides, row)


def _metrics(path: Path) -> Iterator[dict[str, Any]]:
    lines: dict[tuple[int, bool], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # half a line of a killed run
            continue
        lines[line["step"], "eval/loss" in line] = line
    yield from sorted(lines.values(), key=lambda line: int(line["step"]))


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration with dotted keys; lists are values."""
    if not isinstance(node, dict):
        return {prefix: node}
    found: dict[str, Any] = {}
    for name, child in node.items():
        found |= flat(child, f"{prefix}.{name}" if prefix else str(name))
    return found


def settings_of(run: RunRecord) -> dict[str, str]:
    """Return what was chosen for a run: each group's option, and each other key that was typed."""
    chosen = {} if run.plan is None else dict(run.plan.choices)
    for text in run.overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key not in chosen or run.plan is None:
            chosen[key] = value
    return chosen


def differing(runs: Sequence[RunRecord], without: Sequence[str] = ()) -> list[str]:
    """Return the settings in which the runs differ, in the order of the first run that has each."""
    everyone = [settings_of(run) for run in runs]
    keys = dict.fromkeys(key for one in everyone for key in one)
    return [k for k in keys if k not in without and len({one.get(k) for one in everyone}) > 1]

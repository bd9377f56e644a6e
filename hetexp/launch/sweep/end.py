"""The end of a sweep: one table of its runs, what failed and how to run that again, and the report."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.core.sweep.folder import SWEEPS, SweepRow, append_row, key_of, read_rows
from hetexp.launch.sweep.run import ERROR, UnderWay, finished, typed

if TYPE_CHECKING:
    from rich.console import Console

    from hetexp.report.runs import RunRecord

_FOLDER_WORD = re.compile(r"\+{0,2}(?:sweep\.name|hydra\.sweep\.dir)=.*", re.DOTALL)

_PLAIN = re.compile(r"[\w./-]+")
"""What Hydra reads as a text without quotes."""


@contextmanager
def concluded() -> Iterator[None]:
    """Tell what became of the sweep that is started inside, whatever ends it.

    Ends the process with 1 where a run failed and whoever ran the jobs let that pass.
    """
    try:
        yield
    except BaseException as error:
        _tell_end(_exit_code(error))
        raise
    if _tell_end(0):
        sys.exit(1)


def _tell_end(exit_code: int) -> bool:
    sweep = finished()
    return sweep is not None and conclude(sweep, exit_code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def conclude(sweep: UnderWay, exit_code: int, console: Console | None = None) -> bool:
    """Tell what became of the runs, and write the report.

    Args:
        exit_code: of the sweep so far; above 128 a signal ended it, and there is nothing to compare yet.

    Returns:
        Whether a run did not complete.
    """
    from rich.console import Console

    console = console or Console()
    if 0 < exit_code <= 128:
        _record_killed(sweep.folder)
    rows = read_rows(sweep.folder)
    new = [row for row in rows if row not in sweep.before]
    unfinished = [row for row in new if row.status != "completed"]
    if exit_code > 128:
        _say(
            console,
            f"The sweep was stopped. What is complete stays; the rest runs with\n  {again(sweep.folder)}",
        )
        return True
    if not rows:
        return False
    _show(rows, new, sweep.folder, console)
    if unfinished:
        _tell_unfinished(unfinished, sweep, console)
    if sweep.report:
        _report(sweep.folder, console)
    return bool(unfinished)


def again(folder: Path, words: Sequence[str] | None = None) -> str:
    """Return the command that runs what is not complete: what was typed, in the same sweep.

    Args:
        words: of the command line; by default those of this process.
    """
    kept = [word for word in (typed() if words is None else words) if not _FOLDER_WORD.fullmatch(word)]
    sweeps = SWEEPS.absolute()
    if sweeps in folder.parents:
        return shlex.join([*kept, f"sweep.name={folder.relative_to(sweeps).as_posix()}"])
    path = str(folder)
    if not _PLAIN.fullmatch(path):
        path = "'" + path.replace("'", "\\'") + "'"
    return shlex.join([*kept, f"hydra.sweep.dir={path}"])


def _record_killed(folder: Path) -> None:
    """Add a row for each run whose process was ended before it could, as joblib's when memory is short."""
    from omegaconf import OmegaConf

    rows = read_rows(folder)
    recorded = {row.overrides for row in rows}
    for path in sorted(folder.glob("*/.hydra/overrides.yaml")):
        run = path.parent.parent
        overrides: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        key = key_of(overrides)
        number = run.name.partition("-")[0]
        if key not in recorded and number.isdigit():
            started = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
            error = "its process ended without a word; the system may have killed it for want of memory"
            append_row(folder, SweepRow(int(number), key, run.name, "failed", error, started, 0.0))


def _show(rows: Sequence[SweepRow], new: Sequence[SweepRow], folder: Path, console: Console) -> None:
    """Print a row a run; a speed is that of the devices' own, modelled time where they are paced."""
    from rich.table import Table

    from hetexp.report.figures import throughput
    from hetexp.report.runs import read_runs

    records = {record.folder: record for record in read_runs([folder])}
    everyones = set.intersection(*(set(row.overrides) for row in rows)) if len(rows) > 1 else set()
    table = Table(title=f"Sweep {folder.name}", title_justify="left")
    for name in ("run", "what differs", "status", "samples/s", "efficiency"):
        right = name in ("samples/s", "efficiency")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        record = records.get((folder / row.folder).resolve())
        summary = record.summary if record is not None else {}
        speed = throughput(record) if record is not None else None
        efficiency = summary.get("efficiency")
        table.add_row(
            row.folder,
            "\n".join(text for text in row.overrides if text not in everyones),
            _status(row, record, row in new),
            "" if speed is None else f"{speed:,.0f}",
            "" if efficiency is None else f"{efficiency:.1%}",
        )
    console.print(table, markup=False)


def _status(row: SweepRow, record: RunRecord | None, new: bool) -> str:
    status = row.status if new else f"{row.status} before"
    return f"{status}, not valid" if record is not None and record.summary.get("valid") is False else status


def _tell_unfinished(rows: Sequence[SweepRow], sweep: UnderWay, console: Console) -> None:
    folder = sweep.folder
    _say(console, f"{len(rows)} of the runs did not complete:")
    for row in rows:
        path = folder / row.folder / ERROR
        _say(console, f"  {row.folder}  {_first_line(row.error or row.status)}")
        if path.exists():
            _say(console, f"     {path}")
    what = "Only these run again with" if sweep.grid else "The search goes on with"
    _say(console, f"{what}\n  {again(folder)}")


def _report(folder: Path, console: Console) -> None:
    """Write the comparison of the runs; a failure to write it is shown, and no run is worse for it."""
    if not any(folder.rglob("summary.json")):
        return
    try:
        from hetexp.report.write import write_report

        path = write_report([folder], folder, f"Sweep {folder.name}")
    except Exception as error:
        console.print(
            f"The report could not be written ({type(error).__name__}: {error}). "
            "hetexp report makes it of the same folder later.",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return
    _say(console, f"Report: {path}")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

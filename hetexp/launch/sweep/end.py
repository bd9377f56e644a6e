"""The end of a sweep: the table of its runs, the failed runs with the command to repeat them, the report."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.core.sweep.folder import SWEEPS, SweepRow, append_row, key_of, read_rows, unfinished
from hetexp.launch.sweep.run import ERROR, UnderWay, finished, typed
from hetexp.launch.terminal.lines import print_line

if TYPE_CHECKING:
    from rich.console import Console

    from hetexp.report.runs import RunRecord

_FOLDER_WORD = re.compile(r"\+{0,2}(?:sweep\.name|hydra\.sweep\.dir)=.*", re.DOTALL)

_PLAIN = re.compile(r"[\w./-]+")
"""A text that Hydra reads without quotes."""


@contextmanager
def concluded() -> Iterator[None]:
    """Show the results of the sweep that starts inside, however it ends.

    Raises:
        SystemExit: with 1 if a run failed and Hydra's launcher raised no error.
    """
    try:
        yield
    except BaseException as error:
        _conclude_started(_exit_code(error))
        raise
    if _conclude_started(0):
        sys.exit(1)


def _conclude_started(exit_code: int) -> bool:
    sweep = finished()
    return sweep is not None and conclude(sweep, exit_code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def conclude(sweep: UnderWay, exit_code: int, console: Console | None = None) -> bool:
    """Show the results of the runs, and write the report.

    Args:
        exit_code: of the sweep so far; above 128 a signal ended it, and there is no comparison yet.

    Returns:
        Whether a run did not complete.
    """
    from rich.console import Console

    console = console or Console()
    if 0 < exit_code <= 128:
        _record_killed(sweep.folder)
    rows = read_rows(sweep.folder)
    new = [row for row in rows if row not in sweep.before]
    incomplete = unfinished(new)
    if exit_code > 128:
        text = "The sweep was stopped. Its complete runs stay; the others run with"
        print_line(console, f"{text}\n  {again(sweep.folder)}")
        return True
    if not rows:
        return False
    _show(rows, new, sweep.folder, console)
    if incomplete:
        _show_unfinished(incomplete, sweep, console)
    if sweep.report:
        _report(sweep.folder, console)
    return bool(incomplete)


def again(folder: Path, words: Sequence[str] | None = None) -> str:
    """Return the command that runs the runs that are not complete, in the same sweep.

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
    """Add a row for each run whose process was killed before it wrote its row, such as for want of memory."""
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
    """Print a table with a row for each run; the speed of emulated devices is by their modelled time."""
    from rich.table import Table

    from hetexp.report.figures import throughput
    from hetexp.report.runs import read_runs

    records = {record.folder: record for record in read_runs([folder])}
    common = set.intersection(*(set(row.overrides) for row in rows)) if len(rows) > 1 else set()
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
            "\n".join(text for text in row.overrides if text not in common),
            _status(row, record, row in new),
            "" if speed is None else f"{speed:,.0f}",
            "" if efficiency is None else f"{efficiency:.1%}",
        )
    console.print(table, markup=False)


def _status(row: SweepRow, record: RunRecord | None, new: bool) -> str:
    status = row.status if new else f"{row.status} before"
    return f"{status}, not valid" if record is not None and record.summary.get("valid") is False else status


def _show_unfinished(rows: Sequence[SweepRow], sweep: UnderWay, console: Console) -> None:
    folder = sweep.folder
    print_line(console, f"{len(rows)} of the runs did not complete:")
    for row in rows:
        path = folder / row.folder / ERROR
        print_line(console, f"  {row.folder}  {_first_line(row.error or row.status)}")
        if path.exists():
            print_line(console, f"     {path}")
    text = "Only these run again with" if sweep.grid else "The search goes on with"
    print_line(console, f"{text}\n  {again(folder)}")


def _report(folder: Path, console: Console) -> None:
    """Write the comparison of the runs; a failure to write it is only shown."""
    if not any(folder.rglob("summary.json")):
        return
    try:
        from hetexp.report.write import write_report

        path = write_report([folder], folder, f"Sweep {folder.name}")
    except Exception as error:
        problem = f"The report could not be written ({type(error).__name__}: {error})."
        print_line(console, f"{problem} hetexp report makes it of the same folder later.", "yellow")
        return
    print_line(console, f"Report: {path}")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")

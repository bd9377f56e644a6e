"""A running sweep: one process runs it, completed runs are skipped, and each run adds a row at its end.

Hydra starts the jobs, maybe in processes of their own. They share only the files in the sweep's folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock, Timeout
from hydra.experimental.callback import Callback

from hetexp.core.errors import ConfigError, HetexpError, RunFailedError
from hetexp.core.sweep.folder import (
    SWEEP_FILE,
    SWEEP_NOTE,
    SweepRow,
    append_row,
    completed_row,
    key_of,
    last_start,
    read_note,
    read_rows,
)
from hetexp.launch.terminal.lines import print_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from hetexp.plan.run_spec import Request

LOCK = ".sweep.lock"
ERROR = "error.txt"
ACQUIRE_SECONDS = 0.2
_GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass
class UnderWay:
    """The sweep that this process runs."""

    folder: Path
    lock: FileLock
    report: bool
    before: Sequence[SweepRow]
    """Rows from before this start of the sweep."""
    grid: bool = True
    """Whether it is a list of runs; `False` for a search, whose next runs depend on the previous ones."""


_under_way: UnderWay | None = None
_typed: list[str] = []
"""Words of the command line as typed, the program's name first."""


def as_typed(words: Sequence[str]) -> None:
    """Note the command line, for `sweep.json` and for the command that continues the sweep."""
    program = Path(words[0])
    start = ["python", words[0]] if program.suffix == ".py" else [program.stem, "train"]
    _typed[:] = [*start, *words[1:]]


def typed() -> list[str]:
    """Return what `as_typed` noted."""
    return list(_typed)


class Start(Callback):
    """Hydra calls it when a sweep starts, in the process that the user started."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Lock the sweep's folder, or end this process if another one has the lock."""
        from omegaconf import OmegaConf

        global _under_way
        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            lock = _lock(folder)
        except ConfigError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        report = bool(OmegaConf.select(config, "sweep.report", default=True))
        sweeper = OmegaConf.select(config, "hydra.sweeper._target_", default=_GRID)
        _under_way = UnderWay(folder, lock, report, read_rows(folder), grid=sweeper == _GRID)
        overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        _note_start(folder, [str(text) for text in overrides] if isinstance(overrides, list) else [])


def finished() -> UnderWay | None:
    """End the sweep that this process runs, and return it; `None` if there is none."""
    global _under_way
    sweep, _under_way = _under_way, None
    if sweep is not None:
        sweep.lock.release()
    return sweep


def _lock(folder: Path) -> FileLock:
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=ACQUIRE_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"`hydra.sweep.dir` must be the folder of a sweep that is not running now, but {folder} is "
            f"run by {_owner(folder)}. Wait for it, or stop it."
        ) from None
    return lock


def _owner(folder: Path) -> str:
    last = last_start(folder)
    if "process" not in last:
        return "another process"
    return f"process {last['process']} since {last['started_at']}"


def _note_start(folder: Path, overrides: Sequence[str]) -> None:
    """Write `sweep.json`; a sweep that is continued keeps its first start and adds this start."""
    import hetexp
    from hetexp.core.files import write_json

    start = {
        "command": typed(),
        "overrides": list(overrides),
        "started_at": _now(),
        "hetexp": hetexp.__version__,
        "process": os.getpid(),
        "rows_bytes": rows.stat().st_size if (rows := folder / SWEEP_FILE).exists() else 0,
    }
    first = read_note(folder)
    write_json(
        folder / SWEEP_NOTE, first | {"continued": [*first.get("continued", []), start]} if first else start
    )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def run_job(number: int, request: Request, start: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one job of a sweep, unless it has completed before, and add its row.

    Args:
        number: Hydra's number of the job.
        start: checks, plans and launches the run.

    Returns:
        The summary, also of a run that has completed before.

    Raises:
        Exception: whatever `start` raises.
    """
    sweep = request.sweep
    assert sweep is not None
    done = completed_row(sweep, request.overrides)
    label = f"Run {number} ({', '.join(_chosen(sweep, request.overrides)) or 'all as typed'})"
    if done is not None:
        _say(f"{label} completed before: skipped.")
        path = sweep / done.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    started_at, clock = _now(), time.monotonic()
    ending = _Ending("completed", None)
    try:
        return start()
    except BaseException as error:
        ending = _ending(error)
        if ending.details:
            _write_error(request.run_dir / ERROR, ending.details)
            _say(f"{label} {'was refused' if ending.status == 'refused' else 'failed'}: {ending.error}")
        raise
    finally:
        row = SweepRow(
            job=number,
            overrides=key_of(request.overrides),
            folder=os.path.relpath(request.run_dir, sweep),
            status=ending.status,
            error=ending.error,
            started_at=started_at,
            seconds=time.monotonic() - clock,
        )
        append_row(sweep, row)


class _Ending(NamedTuple):
    """How a run ended."""

    status: str
    error: str | None
    details: str = ""
    """Content of `error.txt`; empty if the run did not fail."""


def _ending(error: BaseException) -> _Ending:
    if isinstance(error, ConfigError):
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return _Ending("refused", error.problems[0] + more, str(error))
    if isinstance(error, RunFailedError):
        if error.exit_code > 128:
            return _Ending("interrupted", str(error))
        return _Ending("failed", str(error), f"{error}\n\n{error.details}")
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return _Ending("interrupted", f"stopped by {type(error).__name__}")
    if isinstance(error, HetexpError):
        return _Ending("failed", str(error), str(error))
    return _Ending("failed", f"{type(error).__name__}: {error}", traceback.format_exc())


def _chosen(sweep: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that the sweep chose for this run, without those that the user typed for all."""
    # Hydra writes a typed `false` as `False`.
    typed_for_all = {text.casefold() for text in last_start(sweep).get("overrides", [])}
    return [text for text in key_of(overrides) if text.casefold() not in typed_for_all]


def _write_error(path: Path, text: str) -> None:
    with suppress(OSError):  # the disk may be what ended the run
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n", encoding="utf-8")


def _say(text: str) -> None:
    from rich.console import Console

    print_line(Console(), text)

"""A sweep under way: no other process runs it, completed runs are skipped, each run's end is written down.

Hydra starts the jobs, maybe in processes of their own: what they know of each other is in the sweep's folder.
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
    """Rows that were there before it was started (again)."""
    grid: bool = True
    """Whether it is a list of runs, and no search whose next runs depend on those before."""


_under_way: UnderWay | None = None
_typed: list[str] = []
"""Words as the person typed them, the program's name first."""


def as_typed(words: Sequence[str]) -> None:
    """Note the command line, for `sweep.json` and for what to type to go on."""
    program = Path(words[0])
    start = ["python", words[0]] if program.suffix == ".py" else [program.stem, "train"]
    _typed[:] = [*start, *words[1:]]


def typed() -> list[str]:
    """Return what `as_typed` noted."""
    return list(_typed)


class Start(Callback):
    """Hydra calls it where a sweep starts, in the process that a person started."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Take the sweep's folder for this process, or end it where another one has it."""
        from omegaconf import OmegaConf

        global _under_way
        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            lock = _taken(folder)
        except ConfigError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        report = bool(OmegaConf.select(config, "sweep.report", default=True))
        sweeper = OmegaConf.select(config, "hydra.sweeper._target_", default=_GRID)
        _under_way = UnderWay(folder, lock, report, read_rows(folder), grid=sweeper == _GRID)
        overrides = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        _note_start(folder, [str(text) for text in overrides] if isinstance(overrides, list) else [])


def finished() -> UnderWay | None:
    """Return the sweep that this process runs, which ends with it; `None` if there is none."""
    global _under_way
    sweep, _under_way = _under_way, None
    if sweep is not None:
        sweep.lock.release()
    return sweep


def _taken(folder: Path) -> FileLock:
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=ACQUIRE_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"`hydra.sweep.dir` must be the folder of a sweep that is not running now, but {folder} is "
            f"run by {_who(folder)}. Wait for it, or stop it."
        ) from None
    return lock


def _who(folder: Path) -> str:
    last = last_start(folder)
    if "process" not in last:
        return "another process"
    return f"process {last['process']} since {last['started_at']}"


def _note_start(folder: Path, overrides: Sequence[str]) -> None:
    """Write `sweep.json`; a sweep that is continued keeps its first start and adds this one."""
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
    """Run one job of a sweep, unless it has completed before, and write down how it ended.

    Args:
        number: Hydra's number of the job.
        start: checks, plans and launches it.

    Returns:
        Its summary, of a run that has completed before, too.

    Raises:
        HetexpError, and whatever else `start` raises.
    """
    sweep = request.sweep
    assert sweep is not None
    done = completed_row(sweep, request.overrides)
    label = f"Run {number} ({', '.join(_own(sweep, request.overrides)) or 'all as typed'})"
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
    """How a run ended: what its row says, and what `error.txt` does, if it failed."""

    status: str
    error: str | None
    details: str = ""


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


def _own(sweep: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that the sweep chose for this run, and not the person for all of them."""
    # Hydra writes what was typed as `false` as `False`.
    everyones = {text.casefold() for text in last_start(sweep).get("overrides", [])}
    return [text for text in key_of(overrides) if text.casefold() not in everyones]


def _write_error(path: Path, text: str) -> None:
    with suppress(OSError):  # the disk may be what ended the run
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n", encoding="utf-8")


def _say(text: str) -> None:
    from rich.console import Console

    Console().print(text, markup=False, highlight=False, soft_wrap=True)

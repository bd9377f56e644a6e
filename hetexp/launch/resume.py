"""What `resume` means, found out before anything is started: a run, its checkpoint, and what was passed over.

`auto`, `last`, `best` and `step:N` are of the run that the run folder holds already (`hydra.run.dir=…`), else
of the newest run of the same job beside it: same model, data, optimizer, seed, batch and name. Devices,
strategy and balancing may be others.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetexp.checkpoint.choose import LAST, ResumeRequest, choose
from hetexp.checkpoint.manifest import (
    complete_checkpoints,
    rank_folders,
    search_rank_checkpoints,
)
from hetexp.core.config import Config
from hetexp.core.errors import CheckpointError, ConfigError, must_be
from hetexp.core.files import lock_folder
from hetexp.core.sweep.folder import key_of
from hetexp.launch.reserve import Checked

PLAN, SUMMARY = "plan.json", "summary.json"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_SECTIONS = ("model", "data", "optimizer")
_TRAINER = (
    *("seed", "global_batch_size", "loss", "precision", "schedule", "warmup_steps", "clip_norm"),
    *("drop_last", "overfit_batches"),
)
_LIMITS = ("max_steps", "max_epochs")


@dataclass(frozen=True)
class Job:
    """What is about to run."""

    config: Config
    raw: Mapping[str, Any]
    run_dir: Path
    working_dir: Path
    apart: bool
    """Whether each device trains a model of its own."""
    script: tuple[str, ...] = ()
    """A person's own script and its arguments."""
    overrides: tuple[str, ...] | None = None
    """Of a job of a sweep, whose jobs may differ in strategies alone: it goes on from the same one."""


@dataclass(frozen=True)
class FoundRun:
    """What `resume` stands for."""

    path: Path | None
    """Of the checkpoint; `None`: a new training begins."""
    sentences: tuple[str, ...] = ()
    """Sentences for the screen."""
    in_place: bool = False
    """Whether the run folder's own run goes on in it."""
    finished: bool = False
    """Whether that run has done all that is asked for: its summary stands."""


def find(job: Job) -> FoundRun:
    """Return what `resume` stands for.

    Raises:
        ConfigError, CheckpointError: there is no such checkpoint, or the run folder holds a run that does
            not go on.
    """
    there = (job.run_dir / PLAN).exists()
    if job.config.resume is None:
        if there:
            raise ConfigError(_holds_a_run(job.run_dir))
        return FoundRun(None)
    wish = ResumeRequest.read(job.config.resume, job.working_dir)
    if wish.path is not None:
        if there:
            raise ConfigError(_holds_a_run(job.run_dir))
        return _choose(job, job.working_dir / wish.path, wish.which)
    if there and wish.which not in ("auto", LAST):
        raise ConfigError(_holds_a_run(job.run_dir))
    return _of_this_job(job, wish.which, there)


def going_on(checked: Checked, found: FoundRun) -> Checked:
    """Return what was checked with the checkpoint that was found in place of what was typed."""
    path = str(found.path) if found.path is not None else None
    assert checked.config is not None
    config = checked.config.model_copy(update={"resume": path})
    return checked._replace(raw={**checked.raw, "resume": path}, config=config)


def _of_this_job(job: Job, which: str, there: bool) -> FoundRun:
    runs = [job.run_dir] if there else list(_same_job(job))
    passed: list[str] = []
    for run in runs:
        if not _has_checkpoints(run):
            passed.append(f"'{run}' was passed over: it has no complete checkpoint.")
            continue
        if which == "auto" and _is_done(run, job):
            reason = f"'{run}' is complete, and no more steps are asked for"
            if there:
                return FoundRun(None, (f"resume=auto: {reason}. Nothing is done.",), finished=True)
            return FoundRun(None, (*passed, f"resume=auto: {reason}. A new training begins."))
        with lock_folder(run, wait=False) as idle:
            if not idle:
                fix = "Wait for it, or name another run's folder."
                raise ConfigError(must_be("resume", "of a run that has ended", f"{which} ({run})", fix))
        found = _choose(job, run, LAST if which == "auto" else which)
        return FoundRun(found.path, (*passed, *found.sentences), in_place=there)
    if which == "auto":
        if there:
            passed = [f"'{job.run_dir}' has no complete checkpoint."]
        elif not passed:
            passed = [f"there is no run of the same job in {_place(job.run_dir)}."]
        return FoundRun(None, (f"resume=auto: {' '.join(passed)} A new training begins.",), in_place=there)
    fix = (
        f"There is none in {_place(job.run_dir)} with the same model, data, optimizer, seed, batch and name. "
        f"Name its folder: resume=outputs/2026-01-31/12-00-00-0a1b2c/{which}"
    )
    raise ConfigError(" ".join([must_be("resume", "of a run of the same job", which, fix), *passed]))


def _choose(job: Job, path: Path, which: str) -> FoundRun:
    if job.apart and rank_folders(path):
        if which != LAST:
            fix = "Each device has checkpoints of its own, and they go on from the newest step of all."
            raise ConfigError(must_be("resume", "a run folder", f"{path}/{which}", fix))
        search_rank_checkpoints(path)
        return FoundRun(path, (f"resume: goes on from the ranks' checkpoints of '{path}'.",))
    metric = job.config.trainer.early_stopping.metric
    chosen = choose(path, which, metric)
    return FoundRun(chosen.folder.absolute(), (*chosen.skipped, f"resume: goes on from '{chosen.folder}'."))


def _same_job(job: Job) -> Iterator[Path]:
    """Yield the runs of the same job beside the run folder, the newest first."""
    mine = _identity(job.raw, job.script)
    key = key_of(job.overrides) if job.overrides is not None else None
    found = []
    for plan in _plans(job.run_dir):
        try:
            raw = json.loads(plan.read_text(encoding="utf-8"))
            script = tuple(map(str, (raw["script"], *raw["script_arguments"]) if raw.get("script") else ()))
            same = key is None or key_of(raw["overrides"]) == key
            if same and _identity(raw["config"], script) == mine:
                found.append((plan.stat().st_mtime, plan.parent))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # of another version, or half gone
    for _, run in sorted(found, reverse=True):
        if run != job.run_dir:
            yield run


def _plans(run_dir: Path) -> Iterator[Path]:
    by_date = _DATE.fullmatch(run_dir.parent.name) is not None
    place = _place(run_dir)
    if place.is_dir():
        for plan in place.glob(f"*/*/{PLAN}" if by_date else f"*/{PLAN}"):
            if not by_date or _DATE.fullmatch(plan.parent.parent.name):
                yield plan


def _place(run_dir: Path) -> Path:
    """Return the folder of a run and those beside it; runs of other days are, too."""
    return run_dir.parent.parent if _DATE.fullmatch(run_dir.parent.name) else run_dir.parent


def _identity(raw: Mapping[str, Any], script: tuple[str, ...]) -> Any:
    trainer = raw["trainer"]
    return (
        *(raw.get(section) for section in _SECTIONS),
        {key: trainer.get(key) for key in _TRAINER},
        raw.get("name"),
        script,
    )


def _has_checkpoints(run: Path) -> bool:
    parent = run / "checkpoints"
    if not parent.is_dir():
        return False
    if complete_checkpoints(parent):
        return True
    try:
        return bool(rank_folders(run) and search_rank_checkpoints(run))
    except CheckpointError:
        return False


def _is_done(run: Path, job: Job) -> bool:
    """Return whether a run has done all that is asked for."""
    try:
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
        trainer = json.loads((run / PLAN).read_text(encoding="utf-8"))["config"]["trainer"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    asked = job.raw["trainer"]
    same = all(trainer.get(key) == asked.get(key) for key in _LIMITS)
    return bool(summary.get("status") == "completed" and same)


def _holds_a_run(run_dir: Path) -> str:
    return (
        f"`hydra.run.dir` must be a new folder, but {run_dir} holds a run already, whose results would be "
        "lost. With resume=auto it goes on there."
    )


@contextmanager
def held(found: FoundRun, run_dir: Path) -> Iterator[None]:
    """Keep the checkpoint from being deleted, and the run folder from being resumed, while the block runs.

    What an attempt that goes on in the same folder left of its end is removed first.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        locks.enter_context(lock_folder(run_dir, wait=False))
        if found.path is not None and (found.path / "manifest.json").is_file():
            locks.enter_context(lock_folder(found.path, shared=True, wait=False))
        clear(found, run_dir)
        yield


def clear(found: FoundRun, run_dir: Path) -> None:
    """Remove what an attempt that goes on in the same folder left of its end."""
    if found.in_place:
        (run_dir / SUMMARY).unlink(missing_ok=True)
        for old in ("logs", "plans", "control"):
            shutil.rmtree(run_dir / old, ignore_errors=True)

"""Finds the checkpoint of `resume` before anything starts.

`auto`, `last`, `best` and `step:N` refer to the run in the run folder (`hydra.run.dir=…`). If there is none,
they refer to the newest run of the same job beside it. The same job has the same model, data, optimizer,
seed, batch and name, but maybe other devices, strategy and balancing.
"""

from __future__ import annotations

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
from hetexp.core.errors import CheckpointError, ConfigError, logged, must_be
from hetexp.core.files import check_owner, lock_folder, read_json
from hetexp.core.sweep.folder import key_of
from hetexp.plan.run_spec import RunSpec

PLAN, SUMMARY = "plan.json", "summary.json"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_SECTIONS = ("model", "data", "optimizer")
_TRAINER = (
    *("seed", "global_batch_size", "loss", "precision", "schedule", "warmup_steps", "clip_norm"),
    *("drop_last", "overfit_batches"),
)
_LIMITS = ("max_steps", "max_epochs")


@dataclass(frozen=True)
class FoundRun:
    """The run and checkpoint that `resume` refers to."""

    path: Path | None
    """Folder of the checkpoint; `None`: a new training begins."""
    sentences: tuple[str, ...] = ()
    """Sentences for the screen."""
    in_place: bool = False
    """Whether the run in the run folder goes on there."""
    finished: bool = False
    """Whether that run is complete, so that its summary stays."""


def find(spec: RunSpec) -> FoundRun:
    """Return the run and checkpoint that `resume` refers to.

    Raises:
        ConfigError, CheckpointError: there is no such checkpoint, or the run folder has a run that does not
            go on.
    """
    run_dir, working_dir, resume = spec.request.run_dir, spec.request.working_dir, spec.config.resume
    exists = (run_dir / PLAN).exists()
    request = ResumeRequest.read(resume, working_dir) if resume is not None else None
    in_place = request is not None and request.path is None and request.which in ("auto", LAST)
    if exists and not in_place:
        raise ConfigError(
            f"`hydra.run.dir` must be a new folder, but {run_dir} holds a run already, whose results would "
            "be lost. With resume=auto it goes on there."
        )
    if request is None:
        return FoundRun(None)
    if request.path is not None:
        return _choose(spec, working_dir / request.path, request.which)
    return _of_this_job(spec, request.which, exists)


def going_on(spec: RunSpec, found: FoundRun) -> RunSpec:
    """Return the run with the path of its checkpoint as `resume`."""
    return spec.with_values(resume=str(found.path) if found.path is not None else None)


def resumes_ranks(spec: RunSpec, path: Path) -> bool:
    """Return whether each rank of a run has a checkpoint of its own in a folder to go on from."""
    strategy = None
    with logged("why the strategy cannot be built is reported with its other problems"):
        strategy = spec.strategy
    return strategy is not None and strategy.resumes_ranks(path)


def _of_this_job(spec: RunSpec, which: str, in_place: bool) -> FoundRun:
    run_dir = spec.request.run_dir
    runs = [run_dir] if in_place else list(_same_job(spec))
    skipped: list[str] = []
    for run in runs:
        if not _has_checkpoints(run):
            skipped.append(f"'{run}' was passed over: it has no complete checkpoint.")
            continue
        if which == "auto" and _is_done(run, spec):
            reason = f"'{run}' is complete, and no more steps are asked for"
            if in_place:
                return FoundRun(None, (f"resume=auto: {reason}. Nothing is done.",), finished=True)
            return FoundRun(None, (*skipped, f"resume=auto: {reason}. A new training begins."))
        try:
            _check_owner(spec, run)
        except ConfigError as error:
            if in_place:
                raise
            skipped.append(f"'{run}' was passed over: {error.problems[0]}")
            continue
        with lock_folder(run, wait=False) as idle:
            if not idle:
                fix = "Wait for it, or name another run's folder."
                raise ConfigError(must_be("resume", "of a run that has ended", f"{which} ({run})", fix))
        found = _choose(spec, run, LAST if which == "auto" else which)
        return FoundRun(found.path, (*skipped, *found.sentences), in_place=in_place)
    if which == "auto":
        if in_place:
            skipped = [f"'{run_dir}' has no complete checkpoint."]
        elif not skipped:
            skipped = [f"there is no run of the same job in {_runs_folder(run_dir)}."]
        text = f"resume=auto: {' '.join(skipped)} A new training begins."
        return FoundRun(None, (text,), in_place=in_place)
    fix = (
        f"There is none in {_runs_folder(run_dir)} with the same model, data, optimizer, seed, batch and "
        f"name. Name its folder: resume=outputs/2026-01-31/12-00-00-0a1b2c/{which}"
    )
    raise ConfigError(" ".join([must_be("resume", "of a run of the same job", which, fix), *skipped]))


def _check_owner(spec: RunSpec, path: Path) -> None:
    check_owner(path, spec.config.trust_owner, "resume", "trust_owner={}")


def _choose(spec: RunSpec, path: Path, which: str) -> FoundRun:
    _check_owner(spec, path)
    if resumes_ranks(spec, path):
        if which != LAST:
            fix = "Each device has checkpoints of its own, and they go on from the newest step of all."
            raise ConfigError(must_be("resume", "a run folder", f"{path}/{which}", fix))
        search_rank_checkpoints(path)
        return FoundRun(path, (f"resume: goes on from the ranks' checkpoints of '{path}'.",))
    metric = spec.config.trainer.early_stopping.metric
    chosen = choose(path, which, metric)
    _check_owner(spec, chosen.folder)
    return FoundRun(chosen.folder.absolute(), (*chosen.skipped, f"resume: goes on from '{chosen.folder}'."))


def _same_job(spec: RunSpec) -> Iterator[Path]:
    """Yield the runs of the same job beside the run folder, the newest first."""
    request = spec.request
    script = (str(request.script.absolute()), *request.script_arguments) if request.script is not None else ()
    identity = _identity(spec.raw, script)
    # Jobs of a sweep may differ in strategies alone: each goes on from the same job.
    key = key_of(request.overrides) if request.sweep is not None else None
    runs = []
    for plan in _plans(request.run_dir):
        try:
            raw = read_json(plan)
            ran = tuple(map(str, (raw["script"], *raw["script_arguments"]) if raw.get("script") else ()))
            same = key is None or key_of(raw["overrides"]) == key
            if same and _identity(raw["config"], ran) == identity:
                runs.append((plan.stat().st_mtime, plan.parent))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # of another version, or partly deleted
    for _, run in sorted(runs, reverse=True):
        if run != request.run_dir:
            yield run


def _plans(run_dir: Path) -> Iterator[Path]:
    by_date = _DATE.fullmatch(run_dir.parent.name) is not None
    folder = _runs_folder(run_dir)
    if folder.is_dir():
        for plan in folder.glob(f"*/*/{PLAN}" if by_date else f"*/{PLAN}"):
            if not by_date or _DATE.fullmatch(plan.parent.parent.name):
                yield plan


def _runs_folder(run_dir: Path) -> Path:
    """Return the folder with a run and the runs beside it, including those of other days."""
    return run_dir.parent.parent if _DATE.fullmatch(run_dir.parent.name) else run_dir.parent


def _identity(raw: Mapping[str, Any], script: tuple[str, ...]) -> Any:
    trainer = raw["trainer"]
    return (
        *(raw.get(section) for section in _SECTIONS),
        {key: trainer.get(key) for key in _TRAINER},
        {key: value for key, value in raw.get("loss", {}).items() if value is not None},
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


def _is_done(run: Path, spec: RunSpec) -> bool:
    """Return whether a run is complete, and its limits are those of the new one."""
    try:
        summary = read_json(run / SUMMARY)
        trainer = read_json(run / PLAN)["config"]["trainer"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    same = all(trainer.get(key) == spec.raw["trainer"].get(key) for key in _LIMITS)
    return bool(summary.get("status") == "completed" and same)


@contextmanager
def held(found: FoundRun, run_dir: Path) -> Iterator[None]:
    """Lock the checkpoint against deletion and the run folder against a resume, while the context lasts.

    First `clear` removes the files of an earlier end in the same folder.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        locks.enter_context(lock_folder(run_dir, wait=False))
        if found.path is not None and (found.path / "manifest.json").is_file():
            locks.enter_context(lock_folder(found.path, shared=True, wait=False))
        clear(found, run_dir)
        yield


def clear(found: FoundRun, run_dir: Path) -> None:
    """Remove the files of an earlier end, if the run goes on in the same folder."""
    if found.in_place:
        (run_dir / SUMMARY).unlink(missing_ok=True)
        for old in ("logs", "plans", "control"):
            shutil.rmtree(run_dir / old, ignore_errors=True)

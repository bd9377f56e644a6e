"""Finds the checkpoint that `resume` names: a run's newest, its best, or that of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hetexp.checkpoint.manifest import (
    accepted_path,
    checkpoints_of,
    complete_checkpoints,
    first_whole,
    is_checkpoint_folder,
    newest_first,
    search_checkpoint,
    step_of,
)
from hetexp.checkpoint.rotation import best_of
from hetexp.checkpoint.stage_parts import unfinished
from hetexp.core.errors import CheckpointError, ConfigError, must_be

LAST = "last"
_WORD = re.compile(r"auto|last|best|step:\d+")


@dataclass(frozen=True)
class ResumeRequest:
    """The parsed value of `resume`."""

    path: str | None
    """Folder of a run or a checkpoint; `None`: that of a run of the same job."""
    which: str
    """`auto`, `last`, `best` or `step:<number>`."""

    @classmethod
    def read(cls, text: str, working_dir: Path) -> ResumeRequest:
        """Read `auto`, `last`, `best`, `step:100`, a path, or a run's folder and one of the last three.

        Args:
            working_dir: folder that paths start from; a folder in it is never read as a word.
        """
        if _WORD.fullmatch(text):
            return cls(None, text)
        folder, _, word = text.rpartition("/")
        if folder and word != "auto" and _WORD.fullmatch(word) and not (working_dir / text).exists():
            return cls(folder, word)
        return cls(text, LAST)


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to resume from."""

    folder: Path
    skipped: tuple[str, ...] = ()
    """A sentence for each better checkpoint that is incomplete or damaged."""


def choose(path: Path, which: str = LAST, metric: str = "loss", contents: bool = True) -> Chosen:
    """Return the checkpoint that a path and a word name.

    Args:
        path: folder of a run, of its `checkpoints`, or of one checkpoint.
        which: `last`, `best` or `step:<number>`, of a run.
        metric: metric of the evaluations that `best` compares.
        contents: whether to compare checksums of the files, too, and not names and sizes only.

    Raises:
        ConfigError: the path holds no checkpoints, or is one checkpoint beside `best` or a step.
        CheckpointError: no such checkpoint is complete and undamaged; the message names those that are not.
    """
    if which == LAST:
        return Chosen(*search_checkpoint(path, contents))
    accepted_path(path)
    if is_checkpoint_folder(path):
        fix = f"This is a checkpoint already; {which} chooses among those of a run."
        raise ConfigError(must_be("resume", "a run folder before the last /", f"{path}/{which}", fix))
    parent = checkpoints_of(path)
    candidates = _best(parent, metric) if which == "best" else _of_step(parent, which)
    folder, skipped = first_whole(candidates, contents)
    if folder is None:
        message = must_be("resume", f"{which} of a folder in which it is whole", str(path))
        raise CheckpointError(" ".join([message, *skipped]))
    return Chosen(folder, skipped)


def _best(parent: Path, metric: str) -> list[Path]:
    if ranked := best_of(complete_checkpoints(parent), metric):
        return ranked
    fix = (
        f"Only the checkpoint of a step that was evaluated can be the best (trainer.eval_every, "
        f"trainer.checkpoint_every), and none in {parent} has the {metric}."
    )
    raise CheckpointError(must_be("resume", "last or step:N", "best", fix))


def _of_step(parent: Path, which: str) -> list[Path]:
    step, folders = int(which.partition(":")[2]), newest_first(parent)
    if same := [folder for folder in folders if step_of(folder) == step]:
        return same
    steps = ", ".join(str(step_of(folder)) for folder in reversed(folders)) or "none"
    why = unfinished(parent, step)
    raise CheckpointError(must_be("resume", f"the step of a checkpoint in {parent} ({steps})", which, why))

"""Which checkpoint is meant by the words of `resume`: of a run the newest, the best, or that of a step."""

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
    """What `resume` says."""

    path: str | None
    """A run's folder or a checkpoint's; `None`: of a run of the same job."""
    which: str
    """`auto`, `last`, `best` or `step:<number>`."""

    @classmethod
    def read(cls, text: str, working_dir: Path) -> ResumeRequest:
        """Read `auto`, `last`, `best`, `step:100`, a path, or a run's folder and one of the last three.

        Args:
            working_dir: that paths start from; what is a folder there is no word.
        """
        if _WORD.fullmatch(text):
            return cls(None, text)
        folder, _, word = text.rpartition("/")
        if folder and word != "auto" and _WORD.fullmatch(word) and not (working_dir / text).exists():
            return cls(folder, word)
        return cls(text, LAST)


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that is gone on from."""

    folder: Path
    skipped: tuple[str, ...] = ()
    """A sentence for each better one that was passed over as incomplete or damaged."""


def choose(path: Path, which: str = LAST, metric: str = "loss", contents: bool = True) -> Chosen:
    """Return the checkpoint that is meant.

    Args:
        path: of a run, of its `checkpoints`, or of one checkpoint.
        which: `last`, `best` or `step:<number>`, of a run.
        metric: by which checkpoints are compared.
        contents: whether files are read and their checksums compared, or names and sizes only.

    Raises:
        ConfigError: the path holds no checkpoints, or `which` is not of a run.
        CheckpointError: there is none that is complete and undamaged; it names what was passed over.
    """
    if which == LAST:
        return Chosen(*search_checkpoint(path, contents))
    accepted_path(path)
    if is_checkpoint_folder(path):
        fix = f"This is a checkpoint already; {which} chooses among those of a run."
        raise ConfigError(must_be("resume", "a run folder before the last /", f"{path}/{which}", fix))
    parent = checkpoints_of(path)
    found = _best(parent, metric) if which == "best" else _of_step(parent, which)
    folder, skipped = first_whole(found, contents)
    if folder is None:
        message = must_be("resume", f"{which} of a folder where that is whole", str(path))
        raise CheckpointError(" ".join([message, *skipped]))
    return Chosen(folder, skipped)


def _best(parent: Path, metric: str) -> list[Path]:
    found = best_of(complete_checkpoints(parent), metric)
    if found:
        return found
    fix = (
        f"Only a checkpoint of a step that is evaluated, too, can be the best (trainer.eval_every, "
        f"trainer.checkpoint_every), and none in {parent} tells the {metric}."
    )
    raise CheckpointError(must_be("resume", "last or step:N", "best", fix))


def _of_step(parent: Path, which: str) -> list[Path]:
    step, there = int(which.partition(":")[2]), newest_first(parent)
    found = [folder for folder in there if step_of(folder) == step]
    if found:
        return found
    steps = ", ".join(str(step_of(folder)) for folder in reversed(there)) or "none"
    why = unfinished(parent, step)
    raise CheckpointError(must_be("resume", f"the step of a checkpoint in {parent} ({steps})", which, why))

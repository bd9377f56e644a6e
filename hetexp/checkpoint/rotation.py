"""Which checkpoints of a run stay: the newest, the best, and none that somebody reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetexp.checkpoint.manifest import complete_checkpoints, delete_folder, evaluation_of, is_timed

HIGHER_IS_BETTER = ("accuracy",)
KEPT_TIMED = 2
"""Newest checkpoints among which those by the clock stay, where all others do."""


@dataclass(frozen=True)
class Rotation:
    """How many checkpoints of a run stay."""

    keep_last: int | None
    """Newest ones; `None`: all, but those by the clock."""
    keep_best: int
    """Best ones beside them, of those that were evaluated at their step."""
    metric: str
    """Of the evaluation, by which they are compared."""
    keep_timed: int = KEPT_TIMED
    """Where all stay: one by the clock does if it is among so many newest ones."""


def score(evaluation: Mapping[str, float], metric: str) -> float | None:
    """Return a number that is smaller for a better checkpoint; `None` where there is none to compare."""
    value = evaluation.get(metric)
    if value is None or math.isnan(value):
        return None
    return -value if metric in HIGHER_IS_BETTER else value


def best_of(folders: Sequence[Path], metric: str) -> list[Path]:
    """Return those that were evaluated, the best first; of equal ones the older first.

    Args:
        folders: complete checkpoints, by step.
    """
    scores = {folder: score(evaluation_of(folder), metric) for folder in folders}
    return sorted((f for f in folders if scores[f] is not None), key=lambda f: scores[f] or 0.0)


def rotate(parent: Path, rotation: Rotation) -> list[Path]:
    """Delete the complete checkpoints of a folder that are not to stay, and return them.

    What is not complete is no checkpoint, and is let alone. One that is being read or cannot be deleted stays
    until the next time.
    """
    there = [folder for folder in complete_checkpoints(parent) if not folder.name.startswith(".")]
    if rotation.keep_last is None:
        older = [folder for folder in there[: -rotation.keep_timed] if is_timed(folder)]
    else:
        older = there[: -rotation.keep_last]
    best = best_of(there, rotation.metric)[: rotation.keep_best] if older else []
    deleted = []
    for folder in older:
        if folder not in best:
            with suppress(OSError):
                if delete_folder(folder):
                    deleted.append(folder)
    return deleted

"""Deletes the checkpoints of a run that need not stay; the newest, the best and those being read stay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetexp.checkpoint.manifest import complete_checkpoints, delete_folder, evaluation_of, is_timed

HIGHER_IS_BETTER = ("accuracy",)
KEPT_TIMED = 2
"""Default of `Rotation.keep_timed`."""


@dataclass(frozen=True)
class Rotation:
    """The numbers of checkpoints of a run that stay."""

    keep_last: int | None
    """Newest checkpoints; `None`: all but old ones that were saved by the clock (`keep_timed`)."""
    keep_best: int
    """Best checkpoints beside them, of those that were evaluated at their step."""
    metric: str
    """Metric of the evaluation that compares checkpoints."""
    keep_timed: int = KEPT_TIMED
    """Without `keep_last`: checkpoints saved by the clock stay if they are among so many newest ones."""


def score(evaluation: Mapping[str, float], metric: str) -> float | None:
    """Return a number that is smaller for a better checkpoint; `None` if the metric is absent or NaN."""
    value = evaluation.get(metric)
    if value is None or math.isnan(value):
        return None
    return -value if metric in HIGHER_IS_BETTER else value


def best_of(folders: Sequence[Path], metric: str) -> list[Path]:
    """Return the checkpoints that were evaluated, the best first; of equal ones the older first.

    Args:
        folders: complete checkpoints, by step.
    """
    scores = {folder: score(evaluation_of(folder), metric) for folder in folders}
    return sorted((f for f in folders if scores[f] is not None), key=lambda f: scores[f] or 0.0)


def rotate(parent: Path, rotation: Rotation) -> list[Path]:
    """Delete the complete checkpoints of a folder that need not stay, and return them.

    A folder that is not complete stays. A checkpoint that is being read, or cannot be deleted, stays until
    the next call.
    """
    complete = [folder for folder in complete_checkpoints(parent) if not folder.name.startswith(".")]
    if rotation.keep_last is None:
        older = [folder for folder in complete[: -rotation.keep_timed] if is_timed(folder)]
    else:
        older = complete[: -rotation.keep_last]
    best = best_of(complete, rotation.metric)[: rotation.keep_best] if older else []
    deleted = []
    for folder in older:
        if folder not in best:
            with suppress(OSError):
                if delete_folder(folder):
                    deleted.append(folder)
    return deleted

"""The record of the stages' parts in the checkpoint of a pipeline: their ranks and steps.

Rank 0 puts the parts of all stages together; hosts need no shared file system. A checkpoint is complete if it
has the part of every stage, all of its step. If a lost stage keeps a checkpoint from being written, a note
takes its place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetexp.core.files import write_json


@dataclass(frozen=True)
class StagePart:
    """One stage's part of a checkpoint."""

    pipeline: int
    stage: int
    layers: tuple[int, int]
    """`[first, end)`."""
    rank: int
    device: str
    step: int
    """Optimizer steps that the stage had done."""
    num_tensors: int
    """Tensors of model and optimizer that this rank gave; the lowest of several holders gives a tensor."""
    host: str = ""

    def __str__(self) -> str:
        first, end = self.layers
        where = f"{self.device} on {self.host}" if self.host else self.device
        layers = f"layer {first}" if end - first == 1 else f"layers {first}–{end - 1}"
        return f"stage {self.stage} of pipeline {self.pipeline} ({where}, {layers})"


def to_record(parts: Sequence[StagePart], num_layers: int) -> dict[str, Any]:
    """Return the manifest's record of the parts.

    Args:
        num_layers: layers of the whole model.
    """
    return {"layers": num_layers, "parts": [asdict(part) for part in parts]}


def lacking(record: dict[str, Any], step: int) -> str | None:
    """Return which stage's part a checkpoint of this step lacks, `None` if it lacks none.

    Args:
        record: result of `to_record`.

    Raises:
        KeyError, TypeError, ValueError: the record has another form.
    """
    parts = [StagePart(**{**part, "layers": tuple(part["layers"])}) for part in record["parts"]]
    pipelines: dict[int, list[StagePart]] = {number: [] for number in {0, *(part.pipeline for part in parts)}}
    for part in parts:
        if part.step != step:
            return f"has the part of {part} of step {part.step}"
        pipelines[part.pipeline].append(part)
    for number, stages in sorted(pipelines.items()):
        end = 0
        for place, part in enumerate(sorted(stages, key=lambda part: part.stage)):
            if part.stage != place or part.layers[0] != end:
                return f"lacks the part of stage {place} of pipeline {number} (from layer {end} on)"
            end = part.layers[1]
        if end != record["layers"]:
            return f"lacks the part of stage {len(stages)} of pipeline {number} (from layer {end} on)"
    return None


def note_path(parent: Path, step: int) -> Path:
    """Return the file of the note about a save that did not end."""
    return parent / f".step_{step:08d}.unfinished.json"


def note_unfinished(parent: Path, step: int, stages: Sequence[StagePart]) -> None:
    """Note that a save did not end because a rank was lost before its part had come."""
    parent.mkdir(parents=True, exist_ok=True)
    write_json(note_path(parent, step), {"stages": [str(stage) for stage in stages]}, durable=False)


def unfinished(parent: Path, step: int) -> str:
    """Return a sentence on why a step's save did not end; empty if there is no note."""
    try:
        stages = json.loads(note_path(parent, step).read_text(encoding="utf-8"))["stages"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"The save of step {step} did not end: {' and '.join(stages)} was lost before its part had come."

"""What a checkpoint of a model in stages tells of its parts: whose they are, and of which step.

Rank 0 puts the parts of all stages together, wherever they come from: hosts need no file system that they
share. A checkpoint counts where the part of every stage is in it, and all are of its step. One that a lost
stage kept from being written leaves a note in its place.
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
    """What one stage has given."""

    pipeline: int
    stage: int
    layers: tuple[int, int]
    """`[first, end)`."""
    rank: int
    device: str
    step: int
    """Steps that it had done."""
    num_tensors: int
    """Of the model and the optimizer, that this rank gave: what several hold, the lowest of them gives."""
    host: str = ""

    def __str__(self) -> str:
        first, end = self.layers
        where = f"{self.device} on {self.host}" if self.host else self.device
        layers = f"layer {first}" if end - first == 1 else f"layers {first}–{end - 1}"
        return f"stage {self.stage} of pipeline {self.pipeline} ({where}, {layers})"


def to_record(parts: Sequence[StagePart], num_layers: int) -> dict[str, Any]:
    """Return what the manifest keeps of them.

    Args:
        num_layers: of the whole model.
    """
    return {"layers": num_layers, "parts": [asdict(part) for part in parts]}


def lacking(record: dict[str, Any], step: int) -> str | None:
    """Return which stage's part a checkpoint of this step lacks; `None`: none, by what `to_record` has made.

    Raises:
        KeyError, TypeError, ValueError: it has not made it.
    """
    parts = [StagePart(**{**one, "layers": tuple(one["layers"])}) for one in record["parts"]]
    pipelines: dict[int, list[StagePart]] = {number: [] for number in {0, *(one.pipeline for one in parts)}}
    for part in parts:
        if part.step != step:
            return f"has the part of {part} of step {part.step}"
        pipelines[part.pipeline].append(part)
    for number, own in sorted(pipelines.items()):
        end = 0
        for place, part in enumerate(sorted(own, key=lambda one: one.stage)):
            if part.stage != place or part.layers[0] != end:
                return f"lacks the part of stage {place} of pipeline {number} (from layer {end} on)"
            end = part.layers[1]
        if end != record["layers"]:
            return f"lacks the part of stage {len(own)} of pipeline {number} (from layer {end} on)"
    return None


def note_path(parent: Path, step: int) -> Path:
    """Return where a save that a stage kept from ending is noted."""
    return parent / f".step_{step:08d}.unfinished.json"


def note_unfinished(parent: Path, step: int, stages: Sequence[StagePart]) -> None:
    """Write down that a save did not end, since a rank was lost before its part had come."""
    parent.mkdir(parents=True, exist_ok=True)
    write_json(note_path(parent, step), {"stages": [str(stage) for stage in stages]}, durable=False)


def unfinished(parent: Path, step: int) -> str:
    """Return a sentence on what kept a step's checkpoint from being written; empty where nothing is known."""
    try:
        stages = json.loads(note_path(parent, step).read_text(encoding="utf-8"))["stages"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"The save of step {step} did not end: {' and '.join(stages)} was lost before its part had come."

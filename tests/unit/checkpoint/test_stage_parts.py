"""A checkpoint counts where every stage's part of its step is there; else it says whose it lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetexp.checkpoint.choose import choose
from hetexp.checkpoint.manifest import MANIFEST, find_checkpoint, incompleteness, write_folder
from hetexp.checkpoint.stage_parts import StagePart, lacking, note_path, note_unfinished, to_record
from hetexp.core.errors import CheckpointError

FIRST = StagePart(0, 0, (0, 4), 0, "cuda:0", 8, 12, "one")
LAST = StagePart(0, 1, (4, 6), 1, "xpu:0", 8, 9, "two")
BESIDE = StagePart(1, 0, (0, 6), 2, "cuda:1", 8, 0, "one")


def save(parent: Path, step: int, *parts: StagePart) -> Path:
    with write_folder(parent, step, stages=to_record(parts, 6)) as folder:
        (folder / "a file").write_text("of all stages")
    return parent / f"step_{step:08d}"


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([FIRST, LAST], None),
        ([LAST, BESIDE, FIRST], None),
        ([FIRST], "lacks the part of stage 1 of pipeline 0 (from layer 4 on)"),
        ([LAST], "lacks the part of stage 0 of pipeline 0 (from layer 0 on)"),
        ([BESIDE], "lacks the part of stage 0 of pipeline 0 (from layer 0 on)"),
        (
            [FIRST, replace(LAST, step=7)],
            "has the part of stage 1 of pipeline 0 (xpu:0 on two, layers 4–5) of step 7",
        ),
        ([FIRST, replace(LAST, layers=(5, 6))], "lacks the part of stage 1 of pipeline 0 (from layer 4 on)"),
        ([FIRST, LAST, replace(BESIDE, layers=(0, 5))], "lacks the part of stage 1 of pipeline 1 (from"),
    ],
)
def test_what_a_checkpoint_lacks(parts: list[StagePart], told: str | None) -> None:
    found = lacking(json.loads(json.dumps(to_record(parts, 6))), 8)
    assert found == told or (found is not None and told is not None and found.startswith(told))


def test_a_step_that_a_stage_lacks_is_refused_and_the_one_before_it_counts(tmp_path: Path) -> None:
    whole = save(tmp_path, 4, replace(FIRST, step=4), replace(LAST, step=4))
    part = save(tmp_path, 8, FIRST)
    assert incompleteness(whole) is None
    assert find_checkpoint(tmp_path) == whole
    assert choose(tmp_path, "step:4").folder == whole
    with pytest.raises(CheckpointError) as refused:
        choose(tmp_path, "step:8")
    assert "but is" in str(refused.value)
    assert f"'{part}' was skipped: it lacks the part of stage 1 of pipeline 0" in str(refused.value)


def test_a_record_that_cannot_be_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 8, FIRST, LAST)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"stages": {"parts": [{}]}}))
    told = incompleteness(folder)
    assert told is not None and told.startswith("has a manifest.json that cannot be read")


def test_a_save_that_a_lost_stage_kept_from_ending_is_told_until_it_ends(tmp_path: Path) -> None:
    save(tmp_path, 4, replace(FIRST, step=4), replace(LAST, step=4))
    note_unfinished(tmp_path, 8, [LAST])
    with pytest.raises(CheckpointError) as refused:
        choose(tmp_path, "step:8")
    assert str(refused.value).endswith(
        "(4), but is 'step:8' instead. The save of step 8 did not end: stage 1 of pipeline 0 (xpu:0 on two, "
        "layers 4–5) was lost before its part had come."
    )
    folder = save(tmp_path, 8, FIRST, LAST)
    assert not note_path(tmp_path, 8).exists()
    assert choose(tmp_path, "step:8").folder == folder

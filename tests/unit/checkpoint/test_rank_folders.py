"""Checkpoints of ranks that train apart: the newest step that all of them have."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetexp.checkpoint.manifest import (
    rank_folders,
    search_checkpoint,
    search_rank_checkpoints,
    write_folder,
)
from hetexp.core.errors import CheckpointError


def save(run: Path, rank: int, *steps: int) -> None:
    for step in steps:
        with write_folder(run / "checkpoints" / f"rank_{rank}", step) as folder:
            (folder / "data").write_text(f"{rank} {step}")


def test_ranks_come_in_their_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        save(tmp_path, rank, 1)
    (tmp_path / "checkpoints" / "rank_x").mkdir()
    (tmp_path / "checkpoints" / "rank_3").write_text("no folder")
    assert [folder.name for folder in rank_folders(tmp_path)] == ["rank_0", "rank_2", "rank_10"]
    assert rank_folders(tmp_path / "checkpoints") == rank_folders(tmp_path)
    assert rank_folders(tmp_path / "nothing") == []


def test_the_newest_step_that_all_have(tmp_path: Path) -> None:
    save(tmp_path, 0, 4, 8, 12)  # killed while rank 1 saved step 12
    save(tmp_path, 1, 4, 8, 12)
    (tmp_path / "checkpoints" / "rank_1" / "step_00000012" / "manifest.json").unlink()
    found = search_rank_checkpoints(tmp_path)
    assert [(one.parent.name, one.name) for one in found] == [
        ("rank_0", "step_00000008"),
        ("rank_1", "step_00000008"),
    ]


def test_without_a_common_step_it_is_told(tmp_path: Path) -> None:
    save(tmp_path, 0, 4)
    save(tmp_path, 1, 8)
    with pytest.raises(CheckpointError, match="a step of which every device has a complete checkpoint"):
        search_rank_checkpoints(tmp_path)


def test_one_model_is_not_among_them(tmp_path: Path) -> None:
    save(tmp_path, 0, 4)
    with pytest.raises(CheckpointError, match="hetexp merge makes one model of theirs"):
        search_checkpoint(tmp_path)
    with write_folder(tmp_path / "checkpoints", 4) as folder:
        (folder / "data").write_text("merged")
    assert search_checkpoint(tmp_path) == (tmp_path / "checkpoints" / "step_00000004", ())

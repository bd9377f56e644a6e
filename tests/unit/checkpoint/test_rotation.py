"""Rotation keeps the newest and the best, lets alone what is read or incomplete, and may be killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hetexp.checkpoint.manifest import evaluation_of, find_checkpoint, write_folder
from hetexp.checkpoint.rotation import Rotation, rotate, score
from hetexp.core.files import lock_folder

LOSSES = {1: 0.9, 2: 0.3, 3: 0.5, 4: None, 5: 0.7, 6: 0.4}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for step, loss in LOSSES.items():
        evaluation = None if loss is None else {"loss": loss, "accuracy": loss}
        with write_folder(tmp_path, step, evaluation=evaluation) as folder:
            (folder / "part").write_text(str(step))
    return tmp_path


def steps(parent: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in parent.iterdir())


@pytest.mark.parametrize(
    ("last", "best", "metric", "stay"),
    [
        (None, 1, "loss", [1, 2, 3, 4, 5, 6]),
        (1, 1, "loss", [2, 6]),
        (1, 0, "loss", [6]),
        (1, 2, "loss", [2, 6]),
        (2, 2, "accuracy", [1, 5, 6]),
        (3, 9, "loss", [1, 2, 3, 4, 5, 6]),
        (9, 0, "loss", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_and_the_best_stay(
    saved: Path, last: int | None, best: int, metric: str, stay: list[int]
) -> None:
    rotate(saved, Rotation(last, best, metric))
    assert steps(saved) == stay


@pytest.mark.parametrize(
    ("last", "timed", "kept", "stay"),
    [
        (None, {1, 2, 3, 4, 5, 6}, 2, [2, 5, 6]),  # the best, and the newest
        (None, {1, 2, 3, 4, 5, 6}, 3, [2, 4, 5, 6]),
        (None, {1, 3, 5}, 2, [2, 4, 5, 6]),
        (None, {3, 4}, 2, [1, 2, 5, 6]),
        (3, {1, 2, 3, 4, 5, 6}, 2, [2, 4, 5, 6]),  # asked for: as many as that, whatever they are
        (1, {5, 6}, 2, [2, 6]),
    ],
)
def test_those_by_the_clock_make_room(
    tmp_path: Path, last: int | None, timed: set[int], kept: int, stay: list[int]
) -> None:
    for step, loss in LOSSES.items():
        evaluation = {"loss": loss} if loss is not None else None
        with write_folder(tmp_path, step, evaluation=evaluation, timed=step in timed) as folder:
            (folder / "part").write_text(str(step))
    rotate(tmp_path, Rotation(last, 1, "loss", kept))
    assert steps(tmp_path) == stay


def test_what_was_never_evaluated_is_not_the_best(saved: Path) -> None:
    assert evaluation_of(saved / "step_00000004") == {}
    assert score({}, "loss") is None and score({"loss": float("nan")}, "loss") is None
    with write_folder(saved, 7, evaluation={"loss": float("nan")}) as folder:
        (folder / "part").write_text("7")
    rotate(saved, Rotation(1, 1, "loss"))
    assert steps(saved) == [2, 7]


def test_an_incomplete_one_is_neither_kept_for_last_nor_deleted(saved: Path) -> None:
    (saved / "step_00000006" / "part").unlink()
    rotate(saved, Rotation(1, 1, "loss"))
    assert steps(saved) == [2, 5, 6]
    assert find_checkpoint(saved).name == "step_00000005"


@pytest.mark.skipif(os.name == "nt", reason="folders have no locks there")
def test_one_that_is_being_resumed_from_stays(saved: Path) -> None:
    with lock_folder(saved / "step_00000003", shared=True):
        rotate(saved, Rotation(1, 1, "loss"))
        assert steps(saved) == [2, 3, 6]
    rotate(saved, Rotation(1, 1, "loss"))
    assert steps(saved) == [2, 6]


def test_a_kill_in_the_midst_of_it_leaves_no_half(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to go is renamed first; the next save removes it."""

    def killed(path: Path, ignore_errors: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            rotate(saved, Rotation(1, 1, "loss"))
    gone = [path for path in saved.iterdir() if path.name.startswith(".")]
    assert [path.name.split(".")[1] for path in gone] == ["step_00000001"]
    assert find_checkpoint(saved).name == "step_00000006"
    with write_folder(saved, 8) as folder:
        (folder / "part").write_text("8")
    assert steps(saved) == [2, 3, 4, 5, 6, 8]


@pytest.mark.skipif(os.name == "nt", reason="folders have no locks there")
def test_the_save_of_another_process_that_lives_is_not_tidied_away(saved: Path) -> None:
    other = saved / ".step_00000009.4194304.new"
    other.mkdir()
    with lock_folder(other), write_folder(saved, 7) as folder:
        (folder / "part").write_text("7")
    assert other.is_dir()
    with write_folder(saved, 8) as folder:
        (folder / "part").write_text("8")
    assert not other.exists()

"""Which checkpoint of a run is meant, and which are passed over as incomplete or damaged, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetexp.checkpoint.choose import ResumeRequest, choose
from hetexp.checkpoint.manifest import write_folder
from hetexp.core.errors import CheckpointError, ConfigError

LOSSES = {1: 0.5, 2: 0.2, 3: 0.3, 4: None}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, loss in LOSSES.items():
        told = None if loss is None else {"loss": loss, "accuracy": loss}
        with write_folder(tmp_path / "checkpoints", step, evaluation=told) as folder:
            (folder / "part").write_text(str(step))
    return tmp_path


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("text", "path", "which"),
    [
        ("auto", None, "auto"),
        ("step:100", None, "step:100"),
        ("outputs/a", "outputs/a", "last"),
        ("outputs/a/best", "outputs/a", "best"),
        ("/runs/a/step:7", "/runs/a", "step:7"),
        ("outputs/auto", "outputs/auto", "last"),
        ("step:x", "step:x", "last"),
    ],
)
def test_what_is_typed(text: str, path: str | None, which: str, tmp_path: Path) -> None:
    assert ResumeRequest.read(text, tmp_path) == ResumeRequest(path, which)


def test_a_folder_of_that_name_is_no_word(tmp_path: Path) -> None:
    (tmp_path / "runs" / "best").mkdir(parents=True)
    assert ResumeRequest.read("runs/best", tmp_path) == ResumeRequest("runs/best", "last")


@pytest.mark.parametrize(
    ("which", "metric", "step"),
    [("last", "loss", 4), ("best", "loss", 2), ("best", "accuracy", 1), ("step:3", "loss", 3)],
)
def test_which_one_is_meant(run: Path, which: str, metric: str, step: int) -> None:
    found = choose(run, which, metric)
    assert found.folder == checkpoint(run, step) and found.skipped == ()


def test_damaged_and_incomplete_ones_are_passed_over_and_named(run: Path) -> None:
    (checkpoint(run, 4) / "manifest.json").unlink()
    flip_a_byte(checkpoint(run, 3) / "part")
    found = choose(run)
    assert found.folder == checkpoint(run, 2)
    assert f"{checkpoint(run, 4)}' was skipped: it has no manifest.json" in found.skipped[0]
    assert f"{checkpoint(run, 3)}' was skipped: it is damaged, the checksum of" in found.skipped[1]
    assert choose(run, contents=False).folder == checkpoint(run, 3)  # nothing is read
    flip_a_byte(checkpoint(run, 2) / "part")
    best = choose(run, "best")
    assert best.folder == checkpoint(run, 1) and len(best.skipped) == 2
    with pytest.raises(CheckpointError, match=r"undamaged checkpoint, but the checksum of '.*00000003/part'"):
        choose(checkpoint(run, 3))


def test_what_is_not_there_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must be the step of a checkpoint in .*\(1, 2, 3, 4\)"):
        choose(run, "step:9")
    with pytest.raises(ConfigError, match="best chooses among those of a run"):
        choose(checkpoint(run, 2), "best")
    with pytest.raises(CheckpointError, match="none in .* has the perplexity"):
        choose(run, "best", "perplexity")
    flip_a_byte(checkpoint(run, 2) / "part")
    with pytest.raises(CheckpointError, match=r"step:2 of a folder in which it is whole.*is damaged"):
        choose(run, "step:2")
    with pytest.raises(ConfigError, match="There is nothing at this path"):
        choose(tmp_path / "nowhere", "best")

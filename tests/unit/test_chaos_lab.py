"""What judges killed runs sees what is wrong with one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchlib.tables import write
from chaos_lab import checks, page, schedule
from chaos_lab.checks import EXACT, Reference, Trajectory
from chaos_lab.long_run import account
from chaos_lab.orders import KINDS, drawn
from safetensors.numpy import save_file

WEIGHTS = {"weight": np.array([1.0, 2.0, 2.0])}
USUAL = Reference(
    seconds=1.0,
    trajectory=Trajectory({1: 0.5, 2: 0.25, 3: 0.125}, (), {3: {"eval/loss": 1.0}}),
    parameters={2: WEIGHTS},
    samples={1: Counter([1, 2]), 2: Counter([3, 4]), 3: Counter([5, 6])},
)


def run_folder(folder: Path, rows: list[dict[str, Any]], torn: str = "") -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows) + torn
    folder.joinpath("metrics.jsonl").write_text(text)
    return folder


def test_a_run_like_the_undisturbed_one_has_nothing_wrong(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "train/loss": 0.5**step} for step in (1, 2, 3)]
    run = Trajectory.read(
        run_folder(tmp_path, [*rows, {"step": 3, "eval/loss": 1.0}], torn='{"step": 4, "tr')
    )
    assert checks.wrong_trajectory(run, USUAL, 0.0) == []
    assert checks.missing_steps([run], USUAL) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"step": 2, "train/loss": 0.25 * (1 + 1e-9)}], "the loss of step 2 is off by 1.0e-09"),
        ([{"step": 2, "train/loss": 0.25}, {"step": 2, "train/loss": 0.25}], "steps logged twice: 2"),
        ([{"step": 4, "train/loss": 0.25}], "the loss of step 4 is off by inf"),
        ([{"step": 3, "eval/loss": 1.0 + 1e-9}], "eval/loss at step 3 is 1.000000001 instead of 1.0"),
        ([{"step": 2, "train/loss": float("nan")}], "the loss of step 2 is off by nan"),
    ],
)
def test_another_trajectory_is_told(tmp_path: Path, rows: list[dict[str, Any]], told: str) -> None:
    run = Trajectory.read(run_folder(tmp_path, rows))
    assert checks.wrong_trajectory(run, USUAL, EXACT) == [told]
    assert checks.missing_steps([run], USUAL)


def test_steps_that_a_checkpoint_has_are_not_done_again() -> None:
    run = Trajectory({2: 0.25, 3: 0.125}, (), {})
    assert checks.wrong_trajectory(run, USUAL, 0.0, after=1) == []
    assert checks.wrong_trajectory(run, USUAL, 0.0, after=2) == [
        "it went on from step 2, and did step 2 again"
    ]


def test_one_changed_byte_or_number_of_a_checkpoint_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    save_file(WEIGHTS, folder / "model.safetensors")

    def seal() -> None:
        content = (folder / "model.safetensors").read_bytes()
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps({"files": {"model.safetensors": entry}}))

    seal()
    assert checks.wrong_checkpoints(tmp_path, USUAL, 0.0) == []
    save_file({"weight": WEIGHTS["weight"] + np.array([3e-9, 0, 0])}, folder / "model.safetensors")
    (told,) = checks.wrong_checkpoints(tmp_path, USUAL, 0.0)
    assert "is not what its manifest says" in told
    seal()
    (told,) = checks.wrong_checkpoints(tmp_path, USUAL, EXACT)
    assert told == "the parameters of step_00000002 are off by 1.0e-09"


def test_a_whole_checkpoint_whose_last_rename_is_missing_counts(tmp_path: Path) -> None:
    """`resume` goes on from it, so it is what a killed run is compared with."""
    named, hidden = (tmp_path / "checkpoints" / name for name in ("step_00000002", ".step_00000003.17.new"))
    for folder in (named, hidden):
        folder.mkdir(parents=True)
    assert list(checks.checkpoints(tmp_path)) == [2]
    (hidden / "manifest.json").write_text(json.dumps({"files": {}}))
    assert checks.checkpoints(tmp_path) == {2: named, 3: hidden}


def record(folder: Path, pid: int, *steps: tuple[int, list[int], float]) -> None:
    lines = [json.dumps({"step": s, "indices": indices, "time": time}) for s, indices, time in steps]
    folder.joinpath(f"{pid}.jsonl").write_text("\n".join(lines) + "\n")


def test_other_samples_are_told_but_not_what_a_dead_rank_took_along(tmp_path: Path) -> None:
    record(tmp_path, 7, (1, [1], 1.0), (2, [3], 2.0), (3, [5, 6], 3.0))
    record(tmp_path, 8, (1, [2], 1.0))  # killed between the exchange of step 2 and its record
    assert checks.wrong_samples(tmp_path, USUAL, dead=[8]) == []
    assert checks.wrong_samples(tmp_path, USUAL, dead=[]) == ["step 2 used {} more and {4: 1} fewer samples"]
    record(tmp_path, 9, (1, [2], 1.0))
    assert checks.wrong_samples(tmp_path, USUAL, dead=[8]) == ["step 1 used {2: 1} more and {} fewer samples"]


def test_time_goes_into_steps_and_pauses(tmp_path: Path) -> None:
    times = [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0]
    record(tmp_path, 7, *((step, [0], time) for step, time in enumerate(times, 1)))
    assert checks.pause(tmp_path, 3.5) == 5.0
    assert checks.pause(tmp_path, 8.5) == 1.0
    found = account("one", tmp_path, [3.5])
    assert (found.step_seconds, found.wall_seconds, found.pauses) == (1.0, 10.0, {3.5: 5.0})
    assert found.effective == pytest.approx(0.6)


def test_as_many_seeds_as_kinds_have_one_of_each() -> None:
    assert [drawn(seed).kind for seed in range(100, 100 + len(KINDS))] != list(KINDS)
    assert {drawn(seed).kind for seed in range(100, 100 + len(KINDS))} == set(KINDS)
    faults = schedule.schedule(3, 30, 15.0)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(schedule.KINDS, 5)
    assert faults[-1].seconds == pytest.approx(450.0)
    assert all(later.seconds > fault.seconds for fault, later in zip(faults, faults[1:], strict=False))


def test_a_table_takes_its_place_in_a_page(tmp_path: Path) -> None:
    row = {
        "seed": 3,
        "kind": KINDS[0],
        "result": "survived",
        "problems": [],
        "pause_seconds": 0.5,
        "end_seconds": None,
        "lost_steps": None,
        "wall_seconds": 60.0,
    }
    text = page.table([row, row | {"seed": 4, "problems": ["hung"], "pause_seconds": None}])
    assert f"| {KINDS[0]} | 2 | 1 | 0 | – | 1 | 0.50 (0.50) | – |" in text
    assert "Seeds 3 to 4, 2 kills in 2.0 min." in text
    file = tmp_path / "page.md"
    file.write_text("a\n<!-- chaos: begin -->\nold\n<!-- chaos: end -->\nz\n")
    write(file, {"chaos": text})
    assert file.read_text() == f"a\n<!-- chaos: begin -->\n{text}\n<!-- chaos: end -->\nz\n"
    with pytest.raises(ValueError, match="soak: begin"):
        write(file, {"soak": text})

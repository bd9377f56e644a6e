"""The comparison of two checkouts: equal runs are equal, and the last bit of a loss or a weight shows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import loss_compare
import numpy as np
import pytest
from loss_compare import CONFIGURATIONS, Result, RunError, different_losses, different_parameters, read_run
from safetensors.numpy import save_file

from hetexp.app import conf_dir

LOSSES = (2.5, 2.25, 1 / 3)


def recorded(
    folder: Path, losses: tuple[float, ...] = LOSSES, weight: float = 0.1, status: str = "completed"
) -> Path:
    """Write a run folder of three steps with two checkpoints."""
    for name in ("step_00000003", "rank_1/step_00000003"):
        checkpoint = folder / "checkpoints" / name
        checkpoint.mkdir(parents=True)
        tensors = {"layer.weight": np.array([[1.0, weight]]), "layer.count": np.array(3)}
        save_file(tensors, checkpoint / "model.safetensors")
    rows = [{"step": step, "train/loss": loss, "step_seconds": 0.1} for step, loss in enumerate(losses, 1)]
    rows.append({"step": 3, "eval/loss": 0.75, "eval/samples": 20})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    return folder


def read(folder: Path) -> Result:
    return read_run(folder, steps=3)


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    before, after = read(recorded(tmp_path / "before")), read(recorded(tmp_path / "after"))
    assert before.losses[3, "train/loss"] == 1 / 3
    assert len(before.losses) == len(before.parameters) == 4
    assert different_losses(before, after) == different_parameters(before, after) == []
    assert loss_compare.row("ddp", before, after) == ("| ddp | 4 losses, 4 tensors | equal |", True)


def test_the_last_bit_of_a_loss_counts(tmp_path: Path) -> None:
    other = (*LOSSES[:2], math.nextafter(LOSSES[2], 1))
    before, after = read(recorded(tmp_path / "before")), read(recorded(tmp_path / "after", other))
    (difference,) = different_losses(before, after)
    assert difference.startswith("train/loss of step 3: 0.3333333333333333 → 0.333333333333333")
    assert different_parameters(before, after) == []
    line, equal = loss_compare.row("ddp", before, after)
    assert not equal
    assert "losses that differ: 1," in line


def test_a_step_that_only_one_run_has_counts(tmp_path: Path) -> None:
    longer = read(recorded(tmp_path / "before", (*LOSSES, 0.25)))
    assert different_losses(longer, read(recorded(tmp_path / "after"))) == [
        "train/loss of step 4: 0.25 → None"
    ]


def test_a_loss_that_is_no_number_equals_itself_only(tmp_path: Path) -> None:
    broken = (*LOSSES[:2], math.nan)
    before, after = read(recorded(tmp_path / "before", broken)), read(recorded(tmp_path / "after", broken))
    assert different_losses(before, after) == []
    assert len(different_losses(before, read(recorded(tmp_path / "good")))) == 1


@pytest.mark.parametrize("weight", [math.nextafter(0.1, 1), math.nan])
def test_the_last_bit_of_a_parameter_counts(tmp_path: Path, weight: float) -> None:
    before, after = read(recorded(tmp_path / "before")), read(recorded(tmp_path / "after", weight=weight))
    assert different_losses(before, after) == []
    differences = different_parameters(before, after)
    names = [difference.partition(":")[0] for difference in differences]
    assert names == ["rank_1/step_00000003/layer.weight", "step_00000003/layer.weight"]
    assert not loss_compare.row("ddp", before, after)[1]


def test_other_tensors_count(tmp_path: Path) -> None:
    before, after = read(recorded(tmp_path / "before")), read(recorded(tmp_path / "after"))
    place = "step_00000003/layer."
    after.parameters[place + "weight"] = after.parameters[place + "weight"].reshape(2, 1)
    after.parameters[place + "bias"] = after.parameters.pop(place + "count")
    differences = different_parameters(before, after)
    assert differences == [
        f"{place}bias is only in the run after",
        f"{place}count is only in the run before",
        f"{place}weight: float64[1, 2] → float64[2, 1]",
    ]


def test_a_run_that_is_missing_or_failed_is_never_equal(tmp_path: Path) -> None:
    good = read(recorded(tmp_path / "good"))
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    no_model = recorded(tmp_path / "no_model")
    for path in no_model.rglob("model.safetensors"):
        path.unlink()
    folders = {
        "FileNotFoundError": nothing,
        "status is 'failed'": recorded(tmp_path / "failed", status="failed"),
        "steps \\[3\\]": recorded(tmp_path / "short", LOSSES[:2]),
        "no model.safetensors": no_model,
    }
    for words, folder in folders.items():
        with pytest.raises(RunError, match=words):
            read(folder)
    line, equal = loss_compare.row("ddp", good, RunError("exit code 1"))
    assert (line, equal) == ("| ddp | after: exit code 1 | FAILED |", False)
    assert not loss_compare.row("ddp", RunError("no"), RunError("no"))[1]


def test_every_strategy_has_two_configurations() -> None:
    """But for `auto`, which becomes one of the others."""
    strategies = {path.stem for path in (conf_dir() / "strategy").glob("*.yaml")} - {"auto"}
    names = [strategy for strategy, _ in CONFIGURATIONS]
    assert {name: names.count(name) for name in names} == dict.fromkeys(strategies, 2)


def test_what_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loss_compare.main(["--before", str(tmp_path), "--after", "no-such-commit"])
    assert ended.value.code == 2
    assert "--before and --after must be commits or folders with train.py" in capsys.readouterr().err

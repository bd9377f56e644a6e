"""`hetexp merge` on checkpoints of one configuration: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import unusual_models
from safetensors.torch import load_file
from support import unbuilt_config

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.cli import main
from hetexp.model.mlp import MLP

SYNTHETIC = "hetexp.data.synthetic.Synthetic"


def saved(folder: Path, seed: int = 0, hidden: int = 4, data: str = SYNTHETIC, shift: float = 0.0) -> str:
    """Write a run's folder with one checkpoint of a small model, and return it."""
    raw = unbuilt_config(
        model={"_target_": "hetexp.model.mlp.MLP", "hidden_sizes": [hidden]},
        data={"_target_": data, "num_samples": 32, "num_test_samples": 16},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
        trainer={"seed": seed},
    )
    torch.manual_seed(seed)
    model = MLP(hidden_sizes=[hidden], input_shape=[16], num_classes=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(shift)
    extra: dict[str, Any] = {
        "run_id": folder.name,
        "progress": {"samples": 32},
        "devices": [],
        "config": raw | {"resume": None},
    }
    state = TrainingState(4, {"epoch": 1, "offset": 0}, {"step": 4}, extra)
    save_checkpoint(folder / "checkpoints", model, torch.optim.SGD(model.parameters(), lr=0.1), state)
    return str(folder)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["merge", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["merge", *words]) == 2
    screen = capsys.readouterr()
    assert screen.out == ""
    assert "Traceback" not in screen.err
    return screen.err


def test_runs_are_merged_and_judged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [saved(tmp_path / "a"), saved(tmp_path / "b", shift=0.2)]
    text = printed(capsys, *runs, "--weights", "3", "1")
    merged = tmp_path / "a" / "merged" / "checkpoints" / "step_00000004"
    assert f"Merged checkpoint: {merged}" in text
    report = json.loads((merged / "state.json").read_text())["extra"]["merged"]
    assert [one["device"] for one in report["parents"]] == ["a", "b"]
    assert report["weights"] == [0.75, 0.25]
    losses = [one["loss"] for one in report["parents"]]
    told = f"merged (mean): test loss {report['merged_loss']:.4f}, its parents' a {losses[0]:.4f} (75%)"
    assert told in text
    assert report["worse_than_best_parent"] == (report["merged_loss"] > min(losses))
    assert ("worse than its best parent" in text) == report["worse_than_best_parent"]
    files = [Path(run) / "checkpoints" / "step_00000004" / "model.safetensors" for run in runs]
    one, other = (load_file(file) for file in files)
    for name, value in load_file(merged / "model.safetensors").items():
        torch.testing.assert_close(value, 0.75 * one[name] + 0.25 * other[name])


def normalised(folder: Path, shift: float, data: str = "unusual_models.Shifted") -> str:
    """Write a run's folder with a checkpoint of a model with BatchNorm, trained on shifted data."""
    raw = unbuilt_config(
        model={"_target_": "unusual_models.Normalised"},
        data={"_target_": data, "shift": shift},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
        trainer={"global_batch_size": 16, "seed": 0},
    )
    torch.manual_seed(0)
    model = unusual_models.Normalised()
    extra: dict[str, Any] = {
        "run_id": folder.name,
        "progress": {"samples": 48},
        "devices": [],
        "config": raw | {"resume": None},
    }
    state = TrainingState(4, {"epoch": 1, "offset": 0}, {"step": 4}, extra)
    save_checkpoint(folder / "checkpoints", model, torch.optim.SGD(model.parameters(), lr=0.1), state)
    return str(folder)


def test_batch_norm_is_measured_on_all_runs_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [normalised(tmp_path / "a", 0.0), normalised(tmp_path / "b", 4.0)]
    tensors = []
    for name, order in (("ab", runs), ("ba", runs[::-1])):
        output = ("--output", str(tmp_path / name), "--trust", "unusual_models")
        text = printed(capsys, *order, "--weights", "1", "1", *output)
        assert "BatchNorm: running statistics were measured again on training samples: 48 of" in text
        folder = tmp_path / name / "checkpoints" / "step_00000004"
        report = json.loads((folder / "state.json").read_text())["extra"]["merged"]
        assert report["batch_norm_samples"] == [48, 48]
        tensors.append(load_file(folder / "model.safetensors"))
    for name, value in tensors[0].items():
        assert torch.equal(value, tensors[1][name])
    both = torch.cat([unusual_models.Shifted(shift).train.tensors[0] for shift in (0.0, 4.0)])
    torch.testing.assert_close(tensors[0]["norm.running_mean"], both.mean(dim=0))
    assert bool((tensors[0]["norm.running_var"] - both.var(dim=0)).abs().max() < 0.3)


def test_without_a_runs_data_batch_norm_is_averaged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = [normalised(tmp_path / "a", 0.0), normalised(tmp_path / "b", 4.0, "unusual_models.Gone")]
    text = printed(capsys, *runs, "--weights", "1", "1", "--trust", "unusual_models")
    assert "the data of" in text
    assert "BatchNorm: the parents' running statistics were averaged." in text


def test_a_soup_leaves_out_what_does_not_help(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [saved(tmp_path / "a"), saved(tmp_path / "b", shift=40.0)]
    text = printed(capsys, *runs, "--soup", "greedy", "--output", str(tmp_path / "soup"))
    assert "merged (greedy soup)" in text
    assert "(100%); b" in text
    assert (tmp_path / "soup" / "checkpoints" / "step_00000004" / "manifest.json").is_file()


def test_without_the_data_nothing_is_judged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [saved(tmp_path / name, data="no.such.module.Data") for name in ("a", "b")]
    text = printed(capsys, *runs)
    assert "Nothing is evaluated: " in text
    assert "test loss –" in text


def test_what_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, other = saved(tmp_path / "a"), saved(tmp_path / "b", seed=3)
    assert "`RUN` must be at least two checkpoints" in refused(capsys, one)
    assert "trainer.seed=3" in refused(capsys, one, other)
    assert "must be checkpoints of one model" in refused(capsys, one, saved(tmp_path / "c", hidden=5))
    assert "must be 2 numbers" in refused(capsys, one, one, "--weights", "1")
    assert "`--lora-scaling` must be a number above 0" in refused(capsys, one, one, "--lora-scaling", "0")
    assert "There is nothing at this path" in refused(capsys, one, str(tmp_path / "nothing"))
    assert "began from other weights" in printed(capsys, one, other, "--force")

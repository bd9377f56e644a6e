"""Devices that train apart, each on its part of the data, and what is made of their models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import Train

from hetexp.cli import main
from hetexp.core.errors import ConfigError

COMMON = (
    "data=synthetic",
    "data.num_samples=96",
    "data.num_test_samples=40",
    "model=mlp",
    "model.hidden_sizes=[16]",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=16",
    "trainer.log_every=6",
    "trainer.max_steps=12",
)
APART = ("strategy=independent", "hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[3,1]")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_trained_apart_and_merged(train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = train(*COMMON, *APART, "trainer.checkpoint_every=6")
    summary, merge = run.summary, run.summary["merge"]
    own = [run.folder / "checkpoints" / f"rank_{rank}" / "step_00000012" for rank in range(2)]
    merged = run.folder / "checkpoints" / "step_00000012"
    # As many samples as with any strategy, and nothing exchanged.
    assert (summary["samples"], summary["comm"]["bytes_per_step"]) == (12 * 16, 0)
    states = [json.loads((folder / "state.json").read_text())["extra"] for folder in own]
    assert [state["part"]["samples"] for state in states] == [144, 48]
    assert [state["part"]["device"] for state in states] == ["cpu:0", "cpu:1"]
    assert [[device["id"] for device in state["devices"]] for state in states] == [["cpu:0"], ["cpu:1"]]
    # The mean by samples, judged beside its parents.
    assert merge["weights"] == [0.75, 0.25]
    one, other, both = tensors(own[0]), tensors(own[1]), tensors(merged)
    for name, value in both.items():
        assert not torch.equal(one[name], other[name])
        torch.testing.assert_close(value, 0.75 * one[name] + 0.25 * other[name])
    assert summary["final"]["eval"]["loss"] == merge["merged_loss"]
    losses = [parent["loss"] for parent in merge["parents"]]
    assert merge["worse_than_best_parent"] == (merge["merged_loss"] > min(losses))
    assert summary["checkpoint"] == str(merged)
    assert "merged (mean): test loss" in run.screen
    last = [row for row in run.metrics if "eval/loss" in row][-1]
    assert [last[f"device/cpu:{rank}/eval_loss"] for rank in range(2)] == losses
    # A later merge finds the same, also the losses, on whatever device.
    assert main(["merge", str(run.folder), "--output", str(tmp_path / "later")]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert all(f"{loss:.4f}" in screen for loss in [*losses, merge["merged_loss"]])
    again = tensors(tmp_path / "later" / "checkpoints" / "step_00000012")
    assert all(torch.equal(again[name], value) for name, value in both.items())
    # One device goes on from the merged model, and the same devices from their own.
    single = train(*COMMON, "strategy=single", "hardware=cpu", f"resume={run.folder}", "trainer.max_steps=14")
    assert (single.summary["status"], single.summary["steps"]) == ("completed", 14)
    half = train(*COMMON, *APART, f"resume={run.folder}", "trainer.max_steps=18", "strategy.merge=false")
    whole = train(*COMMON, *APART, "trainer.max_steps=18", "strategy.merge=false")
    for rank in range(2):
        saved = Path("checkpoints") / f"rank_{rank}" / "step_00000018"
        left, right = tensors(half.folder / saved), tensors(whole.folder / saved)
        assert all(torch.equal(left[key], value) for key, value in right.items())
    assert whole.summary["merge"] is None
    with pytest.raises(ConfigError, match="hetexp merge makes one model"):
        train(*COMMON, "strategy=single", "hardware=cpu", f"resume={whole.folder}")

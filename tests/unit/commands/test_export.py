"""`hetexp export`: weights that torch alone loads strictly, tied names included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support import unbuilt_config
from torch import nn

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.cli import main


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


def saved(run: Path, step: int = 4) -> Tied:
    """Write a run's checkpoint, and return its model."""
    torch.manual_seed(step)
    model = Tied()
    config = unbuilt_config(model={"_target_": "mine.Tied", "dim": 3})
    extra: dict[str, Any] = {"run_id": run.name, "config": config}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_checkpoint(run / "checkpoints", model, optimizer, TrainingState(step, {}, {}, extra))
    return model


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["export", *words]) == 2
    return capsys.readouterr().err


READER = """
import sys, torch
from safetensors.torch import load_file
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.head.weight, self.norm = self.embed.weight, torch.nn.BatchNorm1d(3)
model = Tied()
model.load_state_dict(load_file(sys.argv[1]), strict=True)
assert "hetexp" not in sys.modules
print(float(model.head.weight.sum()).hex())
"""


def test_torch_loads_it_strictly_without_hetexp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "run", 2)
    model = saved(tmp_path / "run", 4)
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    assert "Weights of step 4" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    words = [sys.executable, "-c", READER, str(tmp_path / "out" / "model.safetensors")]
    told = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert told.stdout.strip() == float(model.head.weight.sum()).hex(), told.stderr
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["model"] == {"_target_": "mine.Tied", "dim": 3}
    assert (about["step"], about["run_id"], about["tied"]) == (4, "run", {"head.weight": "embed.weight"})
    with safe_open(tmp_path / "out" / "model.safetensors", "pt", "cpu") as file:
        assert file.metadata() == {"format": "pt"}


def test_another_step_in_another_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path / "run", 2)
    saved(tmp_path / "run", 4)
    words = [f"{tmp_path / 'run'}/step:2", "--output", str(tmp_path / "out")]
    assert main(["export", *words, "--dtype", "bfloat16"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["head.weight"], model.head.weight.detach().bfloat16())
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    assert "--force replaces them" in refused(capsys, *words)
    assert main(["export", *words, "--force"]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["head.weight"].dtype == torch.float32


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--output", str(tmp_path / "out"))
    assert "There is nothing at this path" in refused(capsys, str(tmp_path / "nowhere"), *out)
    assert "`RUN` must be the folder of a run" in refused(capsys, "auto", *out)
    saved(tmp_path / "run", 4)
    weights = tmp_path / "run" / "checkpoints" / "step_00000004" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "the checksum of" in refused(capsys, str(tmp_path / "run"), *out)
    (tmp_path / "file").write_text("")
    saved(tmp_path / "run", 5)
    assert "could not be written" in refused(
        capsys, str(tmp_path / "run"), "--output", str(tmp_path / "file" / "out")
    )
    assert not (tmp_path / "out").exists()

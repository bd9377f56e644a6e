"""An exported sparse autoencoder computes on raw vectors what ours does on scaled ones; SAELens loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import unbuilt_config

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.cli import main
from hetexp.model.sae import SAE

SCALE = 2.5


def exported(tmp_path: Path, activation: str, *words: str) -> SAE:
    """Save an autoencoder as a run does, export it by the command, and return it."""
    torch.manual_seed(0)
    sae = SAE(8, activation=activation, k=3, threshold=0.3, input_size=5, scale=SCALE)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in (sae.b_enc, sae.b_dec):
            parameter.normal_(std=0.3)
    data = {"_target_": "unused", "folder": str(tmp_path / "harvest")}
    config = unbuilt_config(
        model={"_target_": "hetexp.model.sae.SAE", "activation": activation, "k": 3}, data=data
    )
    extra: dict[str, Any] = {"run_id": "run", "config": config}
    optimizer = torch.optim.SGD(sae.parameters(), lr=0.1)
    save_checkpoint(tmp_path / "run" / "checkpoints", sae, optimizer, TrainingState(4, {}, {}, extra))
    (tmp_path / "harvest").mkdir()
    (tmp_path / "harvest" / "source.json").write_text(json.dumps({"model": "ours", "layer": "blocks.1"}))
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), *words]) == 0
    return sae


@pytest.mark.parametrize("activation", ["relu", "topk", "jumprelu"])
def test_saelens_computes_the_same(tmp_path: Path, activation: str) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    ours = exported(tmp_path, activation)
    theirs = sae_lens.SAE.load_from_disk(str(tmp_path / "out"), device="cpu")
    assert theirs.cfg.metadata.hook_name == "blocks.1"
    x = torch.randn(50, 5)
    with torch.no_grad():
        features = theirs.encode(x)
        assert torch.equal(features > 0, ours.encode(x * SCALE) > 0)
        assert 0 < int((features > 0).sum()) < features.numel()
        torch.testing.assert_close(features, ours.encode(x * SCALE), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(theirs(x) * SCALE, ours(x * SCALE).output, rtol=1e-5, atol=1e-5)


def test_the_files_without_saelens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = exported(tmp_path, "topk", "--dtype", "bfloat16")
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "cfg.json",
        "hetexp.json",
        "sae_weights.safetensors",
    ]
    about = json.loads((out / "cfg.json").read_text())
    assert (about["architecture"], about["k"], about["dtype"]) == ("topk", 3, "bfloat16")
    assert (about["d_in"], about["d_sae"]) == (5, 8)
    assert about["metadata"]["model_name"] == "ours"
    weights = load_file(out / "sae_weights.safetensors")
    assert sorted(weights) == ["W_dec", "W_enc", "b_dec", "b_enc"]
    assert torch.equal(weights["W_dec"], (ours.W_dec / SCALE).detach().bfloat16())
    again = ["export", str(tmp_path / "run"), "--output", str(out)]
    assert main(again) == 2
    assert "It holds hetexp.json" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0

"""`hetexp verify` with real runs: what is exact is found to be, what is not is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetexp.cli import main

COMMON = (
    "data=synthetic",
    "data.num_samples=64",
    "hardware.devices=[cpu,cpu]",
    "hardware.threads_per_rank=1",
    "balancing=manual",
    "balancing.weights=[3,1]",
    "trainer.global_batch_size=16",
    "launch.start_method=forkserver",
)
GPT = (
    "data.kind=tokens",
    "data.mask_fraction=0.6",
    "model=gpt",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.embedding_size=16",
    "model.tie_weights=true",
    "model.dropout=0.3",
)


def test_a_gpt_with_dropout_is_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["trainer.accumulate=2", "trainer.clip_norm=0.5", "trainer.warmup_steps=50"]
    assert main(["verify", *COMMON, *GPT, *options, "--steps", "4", "--output", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "certificate.json").read_text())
    assert told["verdict"] == "exact"
    assert told["run"]["loss_error"] <= 1e-12 and told["run"]["parameter_error"] <= 1e-12
    assert [one["step"] for one in told["run"]["steps"]] == [1, 2, 3, 4]
    assert told["control"]["parameter_error"] > 1e-6 and told["control_must_differ"]
    assert [one["samples"] for one in told["devices"]] == [12, 4]
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "certificate.md").read_text() in capsys.readouterr().out


def test_plain_averaging_on_unequal_shares_is_not_exact_in_float32_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlp = ["model=mlp", "model.hidden_sizes=[16]", "debug.normalizer=per_rank"]
    words = ["verify", *COMMON, *mlp, "--precision", "float32", "--steps", "3", "--output", str(tmp_path)]
    assert main(words) == 1
    assert "not exact" in capsys.readouterr().out
    told = json.loads((tmp_path / "certificate.json").read_text())
    assert 0 < told["tolerance"]["parameters"] < 1e-5 < told["run"]["parameter_error"]


def test_a_gradient_of_one_percent_too_much_is_not_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Neither the clipped gradient nor AdamW's step show a factor that all gradients have in common.
    options = ["model=mlp", "model.hidden_sizes=[16]", "trainer.clip_norm=0.5"]
    options += ["optimizer.lr=1.0e-5", "optimizer.eps=1.0e-20"]  # hides the 1e-6 that clipping adds to a norm
    loud = "strategy._target_=choosy.Loud"
    words = ["verify", *COMMON, *options, loud, "--steps", "3", "--output", str(tmp_path)]
    assert main(words) == 1
    assert "not exact" in capsys.readouterr().out
    told = json.loads((tmp_path / "certificate.json").read_text())["run"]
    assert told["loss_error"] <= 1e-12 and told["parameter_error"] <= 1e-12
    assert told["grad_norm_error"] == pytest.approx(0.01)


def test_a_short_last_batch_is_among_the_steps(tmp_path: Path) -> None:
    options = ["model=mlp", "model.hidden_sizes=[16]", "data.num_samples=203", "trainer.clip_norm=0.5"]
    assert main(["verify", *COMMON, *options, "--steps", "3", "--output", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "certificate.json").read_text())
    assert [step["samples"] for step in told["run"]["steps"]] == [16, 11, 16]
    assert "Step 2 is a short batch of 11 samples." in (tmp_path / "certificate.md").read_text()
    assert told["cause"] is None


def test_a_loss_that_couples_samples_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [
        "data=custom",
        "data._target_=returning.Vectors",
        "model=custom",
        "model._target_=returning.normed",
    ]
    own += ["trainer.loss=returning.Contrastive", "optimizer=sgd"]
    common = [word for word in COMMON if not word.startswith("data")]
    assert main(["verify", *common, *own, "--steps", "2", "--output", str(tmp_path)]) == 1
    told = json.loads((tmp_path / "certificate.json").read_text())
    assert told["verdict"] == "not exact"
    assert told["cause"].startswith("the loss couples samples")
    assert "**Cause**: the loss couples samples" in capsys.readouterr().out

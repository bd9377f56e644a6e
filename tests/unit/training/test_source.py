"""A source model is harvested in its data's order, and asked what a reconstruction costs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import unbuilt_config
from torch import nn
from torch.utils.data import Subset, TensorDataset

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.cli import main
from hetexp.core.call import call_model
from hetexp.core.errors import ConfigError
from hetexp.data.base import build_data
from hetexp.data.synthetic import Synthetic
from hetexp.model.base import build_model
from hetexp.training.seeding import seed_all
from hetexp.training.source import SourceModel

GPT = {"_target_": "hetexp.model.gpt.GPT", "num_layers": 2, "num_heads": 2, "embedding_size": 8}
TOKENS = {
    "_target_": "hetexp.data.synthetic.Synthetic",
    "kind": "tokens",
    "num_samples": 10,
    "num_test_samples": 7,
    "sequence_length": 6,
    "mask_fraction": 0.4,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has trained nothing, with a checkpoint."""
    return saved(tmp_path / "run", TOKENS)


def saved(run: Path, tokens: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    model = build_model(GPT, build_data(tokens).facts)
    config = unbuilt_config(model=GPT, data=tokens)
    extra: dict[str, Any] = {"run_id": "run", "config": config}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_checkpoint(run / "checkpoints", model, optimizer, TrainingState(4, {}, {}, extra))
    return run


def harvested(run: Path, *words: str) -> Path:
    out = run.parent / "out"
    assert main(["harvest", str(run), "--output", str(out), "--layer", "blocks.1", *words]) == 0
    return out


def test_vectors_are_the_layers_outputs_in_order(run: Path) -> None:
    out = harvested(run, "--batch-size", "3")
    told = json.loads((out / "source.json").read_text())
    assert (told["layer"], told["vectors"]) == ("blocks.1", {"train": 60, "evaluation": 42})
    source = SourceModel(Path(told["checkpoint"]), "blocks.1")
    found: list[torch.Tensor] = []
    source.model.get_submodule("blocks.1").register_forward_hook(lambda _, __, output: found.append(output))
    with torch.no_grad():
        call_model(source.model, torch.stack([source.data.train[index][0] for index in range(10)]))
    vectors = load_file(out / "train_00000.safetensors")["activations"]
    torch.testing.assert_close(vectors, found[0].flatten(0, 1))
    data = build_data({"_target_": "hetexp.data.activations.Activations", "folder": str(out)})
    assert len(data.train) == 60 and len(data.evaluation) == 42  # type: ignore[arg-type]


class Split:
    """Draws which samples are for evaluation."""

    facts: ClassVar[dict[str, int]] = {"vocab_size": 7, "sequence_length": 6}

    def __init__(self) -> None:
        tokens = torch.arange(84).reshape(14, 6) % 7
        order = np.random.permutation(14).tolist()
        data = TensorDataset(tokens, tokens)
        self.train, self.evaluation = Subset(data, order[:7]), Subset(data, order[7:])


def test_it_is_asked_about_samples_that_it_has_not_trained_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The split is the one of its own training, whatever was drawn before."""
    monkeypatch.setitem(sys.modules, "own_split", sys.modules[__name__])
    config = unbuilt_config(model=GPT, data={"_target_": "own_split.Split"}, trainer={"seed": 5})
    model = build_model(GPT, Split.facts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = TrainingState(5, {}, {}, {"run_id": "run", "config": config})
    save_checkpoint(run / "checkpoints", model, optimizer, kept)
    seed_all(5)
    trained_with = build_data(config["data"])
    for _ in range(2):
        source = SourceModel(run / "checkpoints" / "step_00000005", "blocks.1")
        assert source.data.evaluation.indices == trained_with.evaluation.indices  # type: ignore[union-attr]


def test_shards_and_a_limit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetexp.commands.harvest.SHARD_BYTES", 300)
    out = harvested(run, "--batch-size", "2", "--limit", "40", "--dtype", "bfloat16")
    shards = [load_file(path)["activations"] for path in sorted(out.glob("train_*"))]
    assert [len(shard) for shard in shards] == [24, 16]
    assert shards[0].dtype == torch.bfloat16
    assert main(["harvest", str(run), "--output", str(out), "--layer", "blocks.1"]) == 2  # it is there
    assert main(["harvest", str(run), "--output", str(run.parent / "new"), "--layer", "blocks.9"]) == 2


class Identity(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors


class Zero(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(vectors)


class Own(Synthetic):
    """Data of a person's own package."""


def test_a_training_builds_only_a_trusted_source(tmp_path: Path) -> None:
    """The folder of activations may be a stranger's, even if the training is not."""
    out = harvested(saved(tmp_path / "run", TOKENS | {"_target_": f"{__name__}.Own"}), "--trust", __name__)
    data = {"_target_": "hetexp.data.activations.Activations", "folder": str(out), "loss_recovered": 5}
    source = build_data(data).source
    with pytest.raises(ConfigError, match=rf"`data\._target_` must be .* add {__name__} to data\.trust\."):
        SourceModel.judging(source.path, source.samples, 1.0, source.trusted)
    source = build_data(data | {"trust": [__name__]}).source
    assert SourceModel.judging(source.path, source.samples, 1.0, source.trusted).num_samples == 5


def test_what_a_reconstruction_costs(run: Path) -> None:
    out = harvested(run)
    source = SourceModel.judging(out / "source.json", 5, scale=3.0)
    where = (torch.device("cpu"), torch.float64)
    perfect = source.metrics(source.sums(Identity(), 0, 5, 2, *where))
    assert perfect["loss_recovered"] == pytest.approx(1.0, abs=1e-12)
    assert perfect["spliced_loss"] == pytest.approx(perfect["source_loss"], rel=1e-12)
    assert source.metrics(source.sums(Zero(), 0, 5, 2, *where))["loss_recovered"] == 0.0
    inputs, targets = (torch.stack(column) for column in zip(*(source.data.evaluation[i] for i in range(5))))  # type: ignore[index]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(source.model(inputs).flatten(0, 1), targets.flatten())
    assert perfect["source_loss"] == pytest.approx(float(loss), rel=1e-12)


def test_any_cut_adds_up_to_the_same(run: Path) -> None:
    source = SourceModel.judging(harvested(run) / "source.json", 99, scale=1.0)
    assert source.num_samples == 7
    where = (torch.device("cpu"), torch.float64)
    torch.manual_seed(1)
    half = nn.Linear(8, 8).double()
    whole = source.sums(half, 0, 7, 7, *where)
    cut = source.sums(half, 0, 5, 2, *where) + source.sums(half, 5, 7, 9, *where)
    cut += source.sums(half, 7, 7, 1, *where)
    assert cut[0] == whole[0]
    torch.testing.assert_close(cut, whole, rtol=1e-13, atol=0)
    assert len({float(value) for value in whole}) == 4

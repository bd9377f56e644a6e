"""First weights come from files of hetexp, Hugging Face and torch, by name; what does not fit is named."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.checkpoint.weights import load_weights
from hetexp.core.config.weights import first_weights, weights_problems, without_weights
from hetexp.core.errors import ConfigError
from hetexp.model.base import to_precision


class Tied(nn.Module):
    def __init__(self, seed: int = 0, classes: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.head = nn.Linear(3, classes, bias=False)
        if classes == 5:
            self.head.weight = self.embed.weight


def as_file(folder: Path, model: nn.Module) -> Path:
    save_model(model, str(folder / "own.safetensors"))
    return folder / "own.safetensors"


def as_folder(folder: Path, model: nn.Module) -> Path:
    save_model(model, str(folder / "model.safetensors"))
    return folder


def as_shards(folder: Path, model: nn.Module) -> Path:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def as_run(folder: Path, model: nn.Module) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_checkpoint(folder / "checkpoints", model, optimizer, TrainingState(3, {}, {}, {}))
    return folder


def as_torch(folder: Path, model: nn.Module) -> Path:
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, folder / "last.pt")
    return folder / "last.pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("save", [as_file, as_folder, as_shards, as_run, as_torch])
def test_every_form_gives_the_same_weights(
    save: Callable[[Path, nn.Module], Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    source, model = Tied(1), Tied(2)
    load_weights(to_precision(model, dtype), save(tmp_path, source))
    for name, tensor in source.state_dict().items():
        found = model.state_dict()[name]
        assert torch.equal(found, tensor.to(found.dtype)), name
    assert model.head.weight is model.embed.weight


def test_a_checkpoint_in_float64_gives_its_complex_numbers(tmp_path: Path) -> None:
    source = Tied(1)
    to_precision(source, torch.float64)
    model = Tied(2)
    load_weights(model, as_run(tmp_path, source))
    assert torch.equal(model.wave.detach(), source.wave.detach().to(torch.complex64))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    tensors = {name: tensor.clone() for name, tensor in Tied(1, classes=7).state_dict().items()}
    del tensors["norm.bias"]
    path = tmp_path / "other.safetensors"
    save_file(tensors | {"classifier.weight": torch.zeros(2)}, path)
    return path


def test_what_differs_is_named_and_nothing_changes(other: Path) -> None:
    model = Tied(2, classes=6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_weights(model, other)
    text = str(caught.value)
    for part in ("lacks norm.bias", "head.weight [7, 3] for [6, 3]", "also holds classifier.weight"):
        assert part in text
    assert "model.weights_strict=false" in text
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_what_fits_is_loaded_on_request(other: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Tied(2, classes=6)
    head = model.head.weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        load_weights(model, other, strict=False)
    assert "lacks norm.bias" in caplog.text
    assert torch.equal(model.embed.weight, Tied(1, classes=7).embed.weight)
    assert torch.equal(model.head.weight.detach(), head)


def test_the_inner_model_of_a_transformer_may_be_saved_alone(tmp_path: Path) -> None:
    class Classifier(nn.Module):
        base_model_prefix = "bert"

        def __init__(self) -> None:
            super().__init__()
            self.bert, self.classifier = Tied(2), nn.Linear(3, 2)

    model, path = Classifier(), as_folder(tmp_path, Tied(1))
    with pytest.raises(ConfigError, match=r"lacks classifier\.weight, classifier\.bias\. model"):
        load_weights(model, path)
    load_weights(model, path, strict=False)
    assert torch.equal(model.bert.embed.weight, Tied(1).embed.weight)


class Code:
    """What a pickle may run."""


@pytest.mark.parametrize("content", ["code", "noise", "number", "stranger", "nothing"])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    if content == "noise":
        path.write_bytes(b"no weights")
    elif content == "stranger":
        path = tmp_path / "model.safetensors"
        save_file({"a": torch.zeros(2)}, path)
    elif content == "nothing":
        path = tmp_path
    else:
        torch.save({"state_dict": Code()} if content == "code" else 3, path)
    for strict in (True, False):
        with pytest.raises(ConfigError, match=r"`model\.weights` must"):
            load_weights(Tied(), path, strict)


def test_a_class_with_such_an_argument_gets_it_itself(tmp_path: Path) -> None:
    node = {"_target_": "x", "weights": "DEFAULT", "width": 3}
    assert without_weights(node, ["weights", "width"]) == node
    assert first_weights(node, ["weights"]) == (None, True)
    assert weights_problems(node, ["weights"]) == []
    assert without_weights(node, ["width"]) == {"_target_": "x", "width": 3}
    assert first_weights(node, []) == ("DEFAULT", True)
    assert len(weights_problems(node, [])) == 1
    assert weights_problems({"weights": str(tmp_path), "weights_strict": False}, []) == []
    assert len(weights_problems({"weights": str(tmp_path), "weights_strict": "no"}, [])) == 1
    assert len(weights_problems({"weights_strict": False}, [])) == 1

"""What does not fit or was damaged is refused by a sentence that says what differs, and changes nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hetexp.checkpoint.folder import TrainingState, find_checkpoint, load_checkpoint, save_checkpoint
from hetexp.core.errors import CheckpointError, ConfigError

STATE = TrainingState(step=7, position={"sample": 56}, schedule={}, extra={})


class Planted:
    """Unpickling one writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.write_text, (self.path, "run"))


def build(seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def resealed(folder: Path) -> None:
    """Make the manifest fit the files, as somebody who plants one would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refusal(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    """Load, expect a refusal that leaves model and optimizer as they were, and return its message."""
    weights = copy.deepcopy(model.state_dict())
    before = copy.deepcopy(optimizer.state_dict()) if optimizer else None
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, model, optimizer)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    if optimizer is not None and before is not None:
        torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "checkpoints", *build(), STATE)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_planted_pickle_is_refused_and_not_run(
    name: str, sealed: bool, folder: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    (folder / name).write_bytes(pickle.dumps(Planted(victim)))
    if sealed:
        resealed(folder)
    message = refusal(folder, *build(1))
    assert name in message and message.startswith("`resume` must")
    assert not victim.exists()
    pickle.loads((folder / name).read_bytes())  # the plant is a live one
    assert victim.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_truncated_file_is_refused(name: str, folder: Path) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    assert f"has {len(data) // 2} bytes of {name} instead of {len(data)}" in refusal(folder, *build(1))
    resealed(folder)
    assert name in refusal(folder, *build(1))


def test_one_changed_byte_is_refused(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert "checksum" in refusal(folder, *build(1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 2, "files": {}}', "format 2 is newer"),
        ('{"format": 1, "files": {"../x": {"bytes": 1, "sha256": ""}}}', "no plain file name"),
        ('{"format": 1, "files": {"a": {}}}', "cannot be read"),
        ('{"format": 1, "files": []}', "cannot be read"),
        ('{"format": 1, "files": {"gone": {"bytes": 1, "sha256": ""}}}', "lacks gone"),
    ],
)
def test_a_broken_manifest_is_refused(text: str, message: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text)
    assert message in refusal(folder, *build(1))


def test_a_missing_manifest_means_incomplete(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    assert "has no manifest.json" in refusal(folder, *build(1))
    with pytest.raises(
        CheckpointError, match=r"`resume` must be a complete checkpoint, but is '.*step_00000007'"
    ):
        find_checkpoint(folder)


def test_another_model_is_refused_by_tensor_name(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    message = refusal(folder, model, None)
    assert "lacks 2.weight, 2.bias, 3.weight and 1 more" in message
    assert "holds 1.bias, 1.weight" in refusal(folder, nn.Sequential(nn.Linear(4, 3)), None)
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    assert "holds 1.weight (2, 3) for (5, 3), 1.bias (2,) for (5,)" in refusal(folder, other, None)
    assert "meta" in refusal_on_meta(folder)


def refusal_on_meta(folder: Path) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, model, None)
    return str(caught.value)


def test_tied_and_untied_models_do_not_take_each_other(tmp_path: Path) -> None:
    def pair(tied: bool) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    for tied in (True, False):
        model = pair(tied)
        folder = save_checkpoint(tmp_path / str(tied), model, torch.optim.SGD(model.parameters()), STATE)
        message = refusal(folder, pair(not tied), None)
        assert (
            "lacks 1.weight" in message
            if tied
            else "apart from the tensor that the model ties it to" in message
        )


@pytest.mark.parametrize(("saved", "wanted"), [("float64", "float32"), ("float32", "float64")])
def test_another_precision_names_the_key(saved: str, wanted: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2).to(getattr(torch, saved))
    folder = save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()), STATE)
    message = refusal(folder, nn.Linear(2, 2).to(getattr(torch, wanted)), None)
    assert message.startswith(
        f"`trainer.precision` must be '{saved}' to resume this checkpoint, but is '{wanted}'"
    )


def test_another_dtype_is_refused(folder: Path) -> None:
    message = refusal(folder, build()[0].to(torch.bfloat16), None)
    assert "0.weight float32 for bfloat16" in message


def test_another_optimizer_is_refused(folder: Path) -> None:
    model, _ = build(1)
    assert "AdamW" in refusal(folder, model, torch.optim.SGD(model.parameters()))
    two = [{"params": list(layer.parameters())} for layer in model]
    assert "parameter groups, but it holds 1" in refusal(folder, model, torch.optim.AdamW(two))
    assert "parameter group 0" in refusal(folder, model, torch.optim.AdamW(model[0].parameters()))


def test_optimizer_tensors_may_not_be_missing(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    state["optimizer"]["state"]["0.weight"]["exp_avg"]["$tensor"] = "nowhere"
    (folder / "state.json").write_text(json.dumps(state))
    resealed(folder)
    assert "lacks nowhere" in refusal(folder, *build(1))


@pytest.mark.parametrize("name", ["last.ckpt", "model.pt", "weights.safetensors", "missing", "empty"])
def test_other_paths_are_refused_with_what_is_accepted(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif name != "missing":
        path.write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(path)
    assert (
        f"a checkpoint folder (…/checkpoints/step_00000100) or a run folder with checkpoints, but is '{path}'"
        in (str(caught.value))
    )
    with pytest.raises(CheckpointError):
        load_checkpoint(path, nn.Linear(1, 1), None)

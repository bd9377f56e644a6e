"""Save, find and load a checkpoint: a model, its optimizer and the position of the training, in one folder.

`step_00000100/` holds `model.safetensors`, `optimizer.safetensors`, `state.json` and the `manifest.json`
that makes it complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hetexp.checkpoint.manifest import find_checkpoint, folder_name, search_checkpoint, verify, write_folder
from hetexp.checkpoint.model_state import match_model, named_parameters, pack_model
from hetexp.checkpoint.optimizer_state import (
    check_optimizer,
    pack_optimizer,
    part_of_optimizer,
    restore_optimizer,
    tensor_names,
)
from hetexp.core.errors import CheckpointError
from hetexp.core.files import write_json

__all__ = ["TrainingState", "find_checkpoint", "load_checkpoint", "save_checkpoint", "search_checkpoint"]

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


@dataclass(frozen=True)
class TrainingState:
    """Where the training stands. All values are plain JSON types: a tuple comes back as a list."""

    step: int
    """Optimizer steps done."""
    position: dict[str, int]
    """Place in the data, counted in samples."""
    schedule: dict[str, Any]
    extra: dict[str, Any]
    """Provenance: run id, versions, devices, configuration."""


def save_checkpoint(
    parent: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `<parent>/step_<step>/`, whole or not at all, and return it.

    Tensors of any device are copied to the CPU, tied ones are stored once, and no pickle is written. An
    older checkpoint of the same step is replaced.

    Args:
        parent: the run's `checkpoints` folder; made where it is missing. Only one process may write to it.
        model: wrapped by DistributedDataParallel or `torch.compile` or not: the names are the same.
        optimizer: over parameters of the model.
        state: plain JSON types.
        files: further ones that belong to it, by name.

    Raises:
        CheckpointError: something holds a value that cannot be stored, or the folder cannot be written.
    """
    names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters(model).items():
        names.setdefault(parameter, name)
    return save_packed(parent, pack_model(model), pack_optimizer(optimizer, names), state, files)


def save_packed(
    parent: Path,
    model: tuple[Mapping[str, Tensor], Mapping[str, str]],
    optimizer: tuple[Mapping[str, Tensor], Mapping[str, Any]],
    state: TrainingState,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write what `pack_model` and `pack_optimizer` give, as `save_checkpoint` does, and return the folder.

    Raises:
        CheckpointError: something holds a value that cannot be stored, or the folder cannot be written.
    """
    (model_tensors, left_out), (optimizer_tensors, packed) = model, optimizer
    described = asdict(state) | {"optimizer": packed}
    try:
        json.dumps(described)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The training state must be plain JSON types to be saved: {error}.") from error
    with write_folder(parent, state.step) as folder:
        _write_tensors(folder / MODEL, model_tensors, left_out)
        _write_tensors(folder / OPTIMIZER, optimizer_tensors, {})
        write_json(folder / STATE, described)
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
    return parent / folder_name(state.step)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainingState:
    """Verify a checkpoint and put it into the model and the optimizer, on whatever devices these are.

    Everything is checked before anything is changed. The optimizer's moments keep the dtype they were
    saved with and its parameter groups are restored, except for how a step is computed (`fused`,
    `foreach`, …).

    Args:
        folder: a checkpoint folder (see `find_checkpoint`).
        model: of the same architecture and dtype.
        optimizer: of the same class over the same parameters; None loads the model only.

    Raises:
        CheckpointError: incomplete or damaged, or not of this model or optimizer; it says what differs.
    """
    verify(folder)
    described = _read_state(folder / STATE)
    weights = match_model(_read_tensors(folder / MODEL), model)
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise CheckpointError(
            "The model must have data to load a checkpoint into, but is on the meta device."
        )
    packed = described["optimizer"]
    optimizer_tensors: dict[str, Tensor] = {}
    parameters = named_parameters(model)
    if optimizer is not None:
        optimizer_tensors = _read_tensors(folder / OPTIMIZER)
        check_optimizer(packed, optimizer, parameters)
        if lacking := sorted(tensor_names(packed) - optimizer_tensors.keys()):
            raise CheckpointError(
                "`resume` must name a checkpoint with all tensors of the optimizer, but it lacks "
                f"{lacking[0]}."
            )
    model.load_state_dict(weights, strict=True)
    if optimizer is not None:
        restore_optimizer(optimizer_tensors, packed, optimizer, parameters)
    return TrainingState(**{name: described[name] for name in TrainingState.__dataclass_fields__})


def load_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> TrainingState:
    """Put a checkpoint's optimizer state into an optimizer of some of the model's parameters only.

    Args:
        folder: a checkpoint folder that `load_checkpoint` has verified.
        parameters: those that the optimizer has, by any name of theirs in the whole model.

    Raises:
        CheckpointError: it is not of this optimizer.
    """
    described = _read_state(folder / STATE)
    packed = part_of_optimizer(described["optimizer"], parameters)
    tensors = _read_tensors(folder / OPTIMIZER)
    check_optimizer(packed, optimizer, parameters)
    if lacking := sorted(tensor_names(packed) - tensors.keys()):
        raise CheckpointError(
            f"`resume` must name a checkpoint with all tensors of the optimizer, but it lacks {lacking[0]}."
        )
    restore_optimizer(tensors, packed, optimizer, parameters)
    return TrainingState(**{name: described[name] for name in TrainingState.__dataclass_fields__})


def load_state(folder: Path) -> TrainingState:
    """Return where the training stood, without model and optimizer.

    Raises:
        CheckpointError: it cannot be read.
    """
    described = _read_state(folder / STATE)
    return TrainingState(**{name: described[name] for name in TrainingState.__dataclass_fields__})


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout is not torch.strided:
            kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            raise CheckpointError(f"'{name}' must be a dense tensor to be saved, but is a {kind} one.")
    # A copy of its own for each, since safetensors refuses views that share memory.
    copies = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    try:
        safetensors.torch.save_file(copies, path, metadata=dict(metadata) or None)
    except (SafetensorError, ValueError, KeyError) as error:
        if "I/O error" in str(error):  # of the system; `write_folder` names the checkpoint
            raise OSError(f"{path.name}: {str(error).rpartition('I/O error: ')[2]}") from error
        raise CheckpointError(f"'{path.name}' could not be written: {error}.") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path, device="cpu")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"`resume` must name a checkpoint of safetensors files, but '{path}' cannot be read as one: "
            f"{error}."
        ) from error


def _read_state(path: Path) -> dict[str, Any]:
    needed = {"optimizer", *TrainingState.__dataclass_fields__}
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        lacking = sorted(needed - described.keys())
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"`resume` must name a checkpoint with a readable {STATE}, but '{path}' is not: {error}."
        ) from error
    if lacking:
        raise CheckpointError(f"`resume` must name a checkpoint of hetexp, but '{path}' lacks {lacking[0]}.")
    return dict(described)


def read_packed(
    folder: Path,
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any], dict[str, Tensor]]:
    """Verify a checkpoint and return what it holds, without a model to put it into.

    Returns:
        The model's tensors, the names of tied ones that are left out (each with the one that stands for it),
        `state.json`, and the optimizer's tensors.

    Raises:
        CheckpointError: incomplete or damaged.
    """
    verify(folder)
    with safetensors.safe_open(folder / MODEL, "pt", "cpu") as file:
        left_out = dict(file.metadata() or {})
    left_out.pop("format", None)
    described = _read_state(folder / STATE)
    return _read_tensors(folder / MODEL), left_out, described, _read_tensors(folder / OPTIMIZER)


def write_packed(
    parent: Path,
    model: Mapping[str, Tensor],
    left_out: Mapping[str, str],
    optimizer: Mapping[str, Tensor],
    described: Mapping[str, Any],
) -> Path:
    """Write `<parent>/step_<step>/` from what `read_packed` returns, and return it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    step = int(described["step"])
    with write_folder(parent, step) as folder:
        _write_tensors(folder / MODEL, model, left_out)
        _write_tensors(folder / OPTIMIZER, optimizer, {})
        write_json(folder / STATE, dict(described))
    return parent / folder_name(step)

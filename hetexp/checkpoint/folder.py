"""Saves and loads a checkpoint: a model, its optimizer and the position of the training, in one folder.

`step_00000100/` holds `model.safetensors`, `optimizer.safetensors`, `state.json` and the `manifest.json`
that makes it complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hetexp.checkpoint.background import beside
from hetexp.checkpoint.manifest import find_checkpoint, folder_name, search_checkpoint, verify, write_folder
from hetexp.checkpoint.model_state import first_names, match_model, named_parameters, pack_model
from hetexp.checkpoint.optimizer_state import (
    check_optimizer,
    pack_optimizer,
    part_of_optimizer,
    restore_optimizer,
    tensor_names,
)
from hetexp.checkpoint.snapshot import HostCopies, LockPages
from hetexp.checkpoint.tensor_file import Written, check_storable, write_tensors
from hetexp.core.errors import CheckpointError
from hetexp.core.files import read_json, write_json

__all__ = ["TrainingState", "find_checkpoint", "load_checkpoint", "save_checkpoint", "search_checkpoint"]

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
STAGES = "stages"
"""Key, within `TrainingState.extra`, of the record of the stages that the checkpoint was put together of."""


@dataclass(frozen=True)
class TrainingState:
    """The position of a training, in plain JSON types: a tuple comes back as a list."""

    step: int
    """Optimizer steps done."""
    position: dict[str, int]
    """Place in the data, counted in samples."""
    schedule: dict[str, Any]
    extra: dict[str, Any]
    """Provenance: run id, versions, devices, configuration."""

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> TrainingState:
        """Return the state that `state.json` describes."""
        return cls(**{name: described[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, as it was at one moment, on the host."""

    model: Mapping[str, Tensor]
    left_out: Mapping[str, str]
    """Names of tied tensors, each with the one that stands for it."""
    optimizer: Mapping[str, Tensor]
    described: Mapping[str, Any]
    """`state.json`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content of further files, by name."""
    evaluation: Mapping[str, float] | None = None
    """Metrics of these weights, if they were evaluated."""
    timed: bool = False
    """Whether it is saved only because the last checkpoint is old."""
    arrived: Callable[[], None] = lambda: None
    """Waits until the tensors have arrived; any thread may call it."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.described["step"])


class SnapshotMemory:
    """Memory of the host for one snapshot; the next snapshot uses it again.

    Args:
        lock_pages: of the backend whose tensors are copied.
    """

    def __init__(self, lock_pages: LockPages | None = None) -> None:
        self._model, self._optimizer = HostCopies(lock_pages), HostCopies(lock_pages)

    def take(
        self,
        model: tuple[Mapping[str, Tensor], Mapping[str, str]],
        optimizer: tuple[Mapping[str, Tensor], Mapping[str, Any]],
        state: TrainingState,
        files: Mapping[str, bytes] | None = None,
        evaluation: Mapping[str, float] | None = None,
        timed: bool = False,
    ) -> Snapshot:
        """Copy the results of `pack_model` and `pack_optimizer`; the snapshot before is lost.

        Raises:
            CheckpointError: a value cannot be stored.
        """
        described = asdict(state) | {"optimizer": optimizer[1]}
        try:
            json.dumps(described)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"The training state must be plain JSON types to be saved: {error}."
            ) from error
        weights, weights_arrived = self._model.take(model[0])
        moments, moments_arrived = self._optimizer.take(optimizer[0])

        def arrived() -> None:
            weights_arrived()
            moments_arrived()

        return Snapshot(weights, model[1], moments, described, files or {}, evaluation, timed, arrived)


def packed_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[tuple[dict[str, Tensor], dict[str, str]], tuple[dict[str, Tensor], dict[str, Any]]]:
    """Return the results of `pack_model` and `pack_optimizer` for a model that this rank holds as a whole.

    Raises:
        CheckpointError: a value cannot be stored.
    """
    return pack_model(model), pack_optimizer(optimizer, first_names(model))


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
        parent: the run's `checkpoints` folder; made if it is missing. Only one process may write to it.
        model: wrapped by DistributedDataParallel or `torch.compile` or not: the names are the same.
        optimizer: over parameters of the model.
        state: plain JSON types.
        files: content of further files, by name.

    Raises:
        CheckpointError: a value cannot be stored, or the folder cannot be written.
    """
    return write_snapshot(parent, SnapshotMemory().take(*packed_whole(model, optimizer), state, files))


def write_snapshot(parent: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot as `save_checkpoint` writes a model, and return the folder; any thread may do so.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    written: dict[str, Written] = {}
    snapshot.arrived()
    stages = snapshot.described.get("extra", {}).get(STAGES)
    about = (snapshot.evaluation, stages, snapshot.timed)
    with write_folder(parent, snapshot.step, written, *about) as folder:
        # Side by side: one file's checksum takes as long as its write, and cannot be split among threads.
        with beside(lambda: write_tensors(folder / MODEL, snapshot.model, snapshot.left_out)) as model:
            written[OPTIMIZER] = write_tensors(folder / OPTIMIZER, snapshot.optimizer, {})
        written[MODEL] = model.result()
        write_json(folder / STATE, dict(snapshot.described))
        for name, content in snapshot.files.items():
            (folder / name).write_bytes(content)
    return parent / folder_name(snapshot.step)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainingState:
    """Verify a checkpoint and load it into the model and the optimizer, on any devices.

    All checks come before any change. The optimizer's moments keep the dtype that they were saved with. Its
    parameter groups are restored, except for how a step is computed (`fused`, `foreach`, …).

    Args:
        folder: a checkpoint folder (see `find_checkpoint`).
        model: of the same architecture and dtype.
        optimizer: of the same class over the same parameters; `None`: only the model is loaded.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or of another model or optimizer; the
            message says what differs.
    """
    verify(folder)
    described = _read_state(folder / STATE)
    weights = match_model(_read_tensors(folder / MODEL), model)
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise CheckpointError(
            "The model must have data to load a checkpoint into, but is on the meta device."
        )
    if optimizer is None:
        model.load_state_dict(weights, strict=True)
        return TrainingState.of(described)
    packed, parameters = described["optimizer"], named_parameters(model)
    tensors = _checked_tensors(folder, packed, optimizer, parameters)
    model.load_state_dict(weights, strict=True)
    restore_optimizer(tensors, packed, optimizer, parameters)
    return TrainingState.of(described)


def load_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> TrainingState:
    """Load a checkpoint's optimizer state into an optimizer of a part of the model's parameters.

    Args:
        folder: a checkpoint folder that `load_checkpoint` has verified.
        parameters: the optimizer's parameters, by any of their names in the whole model.

    Raises:
        CheckpointError: the checkpoint is not of this optimizer.
    """
    described = _read_state(folder / STATE)
    packed = part_of_optimizer(described["optimizer"], parameters)
    tensors = _checked_tensors(folder, packed, optimizer, parameters)
    restore_optimizer(tensors, packed, optimizer, parameters)
    return TrainingState.of(described)


def load_state(folder: Path) -> TrainingState:
    """Return the position of the training, without model and optimizer.

    Raises:
        CheckpointError: `state.json` cannot be read.
    """
    return TrainingState.of(_read_state(folder / STATE))


def _checked_tensors(
    folder: Path,
    packed: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Return the optimizer's tensors, after checking that they and `packed` belong to this optimizer."""
    tensors = _read_tensors(folder / OPTIMIZER)
    check_optimizer(packed, optimizer, parameters)
    if lacking := sorted(tensor_names(packed) - tensors.keys()):
        raise CheckpointError(
            f"`resume` must name a checkpoint with all tensors of the optimizer, but it lacks {lacking[0]}."
        )
    return tensors


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
        described = read_json(path)
        lacking = sorted(needed - described.keys())
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"`resume` must name a checkpoint with a readable {STATE}, but '{path}' is not: {error}."
        ) from error
    if lacking:
        raise CheckpointError(f"`resume` must name a checkpoint of hetexp, but '{path}' lacks {lacking[0]}.")
    if not isinstance(described["step"], int):
        raise CheckpointError(
            f"`resume` must name a checkpoint of hetexp, but the step of '{path}' is no number."
        )
    return dict(described)


def read_packed(
    folder: Path,
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any], dict[str, Tensor]]:
    """Verify a checkpoint and return its content, without a model to load it into.

    Returns:
        The model's tensors, the names of tied tensors that are left out (each with the name that stands for
        it), `state.json`, and the optimizer's tensors.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
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
    check_storable(model)
    weights, moments = (
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        for tensors in (model, optimizer)
    )
    return write_snapshot(parent, Snapshot(weights, left_out, moments, described))

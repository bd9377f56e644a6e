"""Checkpoints of a model in stages: rank 0 gathers the same files as those of a whole model.

Each tensor comes from the lowest of the ranks that hold it, through the host, one after another.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetexp.checkpoint.folder import STAGES, TrainingState, load_optimizer, load_state
from hetexp.checkpoint.optimizer_state import join_optimizers, pack_optimizer, part_of_optimizer, tensor_names
from hetexp.checkpoint.stage_parts import StagePart, lacking, note_unfinished, to_record
from hetexp.comm.communicator import peer_lost
from hetexp.core.errors import CheckpointError, PeerLostError
from hetexp.strategy.pipeline.cutting import Cut
from hetexp.strategy.pipeline.shared_gradients import parameters_by_name
from hetexp.training.engine import CheckpointParts
from hetexp.training.state import TrainState


def gather(state: TrainState, cut: Cut, group: dist.ProcessGroup, step: int) -> CheckpointParts | None:
    """Return the whole model and its optimizer on rank 0, `None` elsewhere; all ranks call it.

    If a rank is lost before it has sent its part, a note is written beside the checkpoints.

    Args:
        group: of all ranks, through the host.
        step: number of steps done, the same on all ranks.

    Raises:
        CheckpointError: a value cannot be stored, or a stage's part is of another step.
        PeerLostError: a rank is gone.
    """
    model, optimizer, packed = pack_part(state, cut)
    if state.rank != 0:
        _send(group, step, model, optimizer, packed)
        return None
    described = [packed]
    stages = _parts_of(state, 0, step, len(model) + len(optimizer))
    for rank in range(1, state.plan.world_size):
        try:
            of_step, tensors, states, description = _receive(group, rank)
        except PeerLostError:
            with contextlib.suppress(OSError):  # the disk may be full, too
                note_unfinished(state.checkpoints, step, _parts_of(state, rank, step, 0))
            raise
        stages += _parts_of(state, rank, of_step, len(tensors) + len(states))
        model |= tensors
        optimizer |= states
        described.append(description)
    whole = cut.whole
    record = to_record(stages, len(whole.pieces.layer_names))
    if lacks := lacking(record, step):
        raise CheckpointError(f"The checkpoint of step {step} cannot be written: it {lacks}.")
    if missing := sorted(set(cut.saved_as.values()) - model.keys()):
        holder = cut.holders.get(missing[0], (0,))[0]
        (first, *_) = _parts_of(state, holder, step, 0)
        raise CheckpointError(f"The part of {first} must have '{missing[0]}', which did not come.")
    # A rank whose layers have nothing to train has groups without parameters.
    trained = [part for part in described if any(group["params"] for group in part["param_groups"])]
    joined = join_optimizers(trained, list(dict.fromkeys(whole.parameters.values())))
    saved = dict(sorted(model.items())), cut.saved_names()
    return CheckpointParts(saved, (optimizer, joined), {STAGES: record})


def _parts_of(state: TrainState, rank: int, step: int, num_tensors: int) -> list[StagePart]:
    """Return the record of a rank's stages."""
    device = state.plan.devices[rank]
    return [
        StagePart(
            pipeline=stage.replica,
            stage=stage.index,
            layers=(stage.first_layer, stage.end_layer),
            rank=rank,
            device=device.id,
            step=step,
            num_tensors=num_tensors,
            host=str(device.host or ""),
        )
        for stage in state.plan.stages[rank]
    ]


def pack_part(state: TrainState, cut: Cut) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of model and optimizer that this rank sends, and the optimizer's other state."""
    tensors_of_model = state.model.state_dict()
    for name, value in tensors_of_model.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(f"The model's '{name}' must be a tensor to be saved, but is {kind}.")
    sends = {
        name for name, value in cut.whole.parameters.items() if min(cut.holders[value]) == state.rank
    } | {name for name in cut.whole.buffers if min(cut.holders[name]) == state.rank}
    model = {cut.saved_as[name]: value for name, value in tensors_of_model.items() if name in sends}
    parameters = parameters_by_name(state.model, cut)
    names: dict[nn.Parameter, str] = {parameter: name for name, parameter in parameters.items()}
    optimized = [p for group in state.optimizer.param_groups for p in group["params"]]
    names |= {p: NOTHING for p in optimized if p not in names and p.numel() == 0}
    tensors, packed = pack_optimizer(state.optimizer, names)
    packed = part_of_optimizer(packed, {name for name in parameters if name in sends})
    kept = tensor_names(packed)
    return model, {name: value for name, value in tensors.items() if name in kept}, packed


NOTHING = "nothing"
"""Name of the empty parameter of a rank without trained parameters."""


def load_part(state: TrainState, cut: Cut, folder: Path) -> TrainingState:
    """Load a checkpoint's optimizer state into this rank's optimizer; the weights are in the model already.

    Raises:
        CheckpointError: it is not of this optimizer.
    """
    local = parameters_by_name(state.model, cut)
    if not any(parameter.requires_grad for parameter in local.values()):
        return load_state(folder)
    by_any_name = {name: local[first] for name, first in cut.whole.parameters.items() if first in local}
    return load_optimizer(folder, state.optimizer, by_any_name)


def _send(
    group: dist.ProcessGroup,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    packed: Mapping[str, Any],
) -> None:
    header = {"step": step, "model": _described(model), "optimizer": _described(optimizer), "packed": packed}
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    try:
        dist.send(torch.tensor([len(text)]), 0, group=group)
        dist.send(text, 0, group=group)
        for tensor in (*model.values(), *optimizer.values()):
            if tensor.numel():
                dist.send(_bytes(tensor.detach().cpu().contiguous()), 0, group=group)
    except RuntimeError as error:
        raise peer_lost(error) from error


def _receive(
    group: dist.ProcessGroup, rank: int
) -> tuple[int, dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    try:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, group=group)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, rank, group=group)
        header = json.loads(bytes(text.tolist()).decode())
        model: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        for key, tensors in (("model", model), ("optimizer", optimizer)):
            for name, shape, dtype in header[key]:
                tensors[name] = tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                if tensor.numel():
                    dist.recv(_bytes(tensor), rank, group=group)
    except RuntimeError as error:
        raise peer_lost(error) from error
    return header["step"], model, optimizer, header["packed"]


def _described(tensors: Mapping[str, Tensor]) -> list[tuple[str, list[int], str]]:
    return [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as bytes: a view."""
    return tensor.reshape(-1).view(torch.uint8)

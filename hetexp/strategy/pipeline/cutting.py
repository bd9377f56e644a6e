"""Cuts the whole model into a rank's stages, by the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetexp.checkpoint.model_state import pack_model
from hetexp.comm.boundary import Layout
from hetexp.comm.compression import compressor_of
from hetexp.core.call import call_model
from hetexp.core.plan import Plan
from hetexp.core.stage import Stage
from hetexp.model.cut import Piece, Whole, keep_only, whole_of
from hetexp.model.layered import call_layer


@dataclass
class Cut:
    """A rank's part of the model, and facts about the whole one."""

    whole: Whole
    stages: tuple[Stage, ...]
    """This rank's, in the order of the pipeline."""
    pieces: tuple[Piece, ...]
    """One a stage, of this rank's modules."""
    group: tuple[int, ...]
    """Ranks of this rank's pipeline, in rising order."""
    num_stages: int
    """Of this rank's pipeline."""
    layouts: dict[int, Layout]
    """First layer of a stage → layout of its input."""
    examples: tuple[Any, ...]
    """A small batch of each piece's input, on the host."""
    holders: dict[str, tuple[int, ...]]
    """First name of a parameter, or name of a buffer → the ranks that hold it."""
    saved_as: dict[str, str]
    """Name in the whole model's state → the name that a checkpoint keeps."""

    def saved_names(self) -> dict[str, str]:
        """Return the names of the whole model's state that a checkpoint leaves out, with the one kept."""
        return {name: kept for name, kept in self.saved_as.items() if name != kept}


def cut_model(plan: Plan, rank: int, model: nn.Module, inputs: Any) -> Cut:
    """Remove from the model, in place, all layers that this rank does not compute.

    Args:
        model: whole, on the CPU; the remaining modules keep their names.
        inputs: a small batch of the training data, of the model's type.

    Raises:
        ConfigError: the model cannot be cut.
    """
    whole = whole_of(model)
    stages = tuple(sorted(plan.stages[rank], key=lambda stage: stage.index))
    replica = stages[0].replica
    of_replica = [stage for held in plan.stages for stage in held if stage.replica == replica]
    starts = {stage.first_layer for stage in of_replica}
    payloads = trace(model, whole, inputs, starts)
    _, left_out = pack_model(model)
    saved_as = {name: left_out.get(name, name) for name in model.state_dict()}
    num_samples = len(next(iter(_tensors(payloads[0]))))
    compressor = compressor_of(plan.boundary_wire)
    ranges = [(stage.first_layer, stage.end_layer) for stage in stages]
    pieces = tuple(Piece(model, whole.pieces, *layers) for layers in ranges)
    keep_only(model, whole, ranges)
    return Cut(
        whole=whole,
        stages=stages,
        pieces=pieces,
        group=tuple(r for r, held in enumerate(plan.stages) if held[0].replica == replica),
        num_stages=len(of_replica),
        layouts={
            start: Layout.of(payload, num_samples, whole.pieces.layer_names[start - 1], compressor)
            for start, payload in payloads.items()
            if start
        },
        examples=tuple(payloads[first] for first, _ in ranges),
        holders=holders_of(plan.stages, whole),
        saved_as=saved_as,
    )


def trace(model: nn.Module, whole: Whole, inputs: Any, starts: set[int]) -> dict[int, Any]:
    """Return the inputs of the layers `starts`; those of layer 0 are the model's.

    The model and the random states are left as they were.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    payloads = {0: inputs}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        payload = call_model(whole.pieces.begin, inputs)
        for number, name in enumerate(whole.pieces.layer_names):
            if number and number in starts:
                payloads[number] = payload
            if whole.pieces.uniform:
                continue
            payload = call_layer(model.get_submodule(name), payload)
    for buffer, before in buffers:
        buffer.copy_(before)
    return payloads


def holders_of(stages: Sequence[Sequence[Stage]], whole: Whole) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold each parameter (by its first name) and each buffer, in rising order."""
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(stages):
        ranges = [(stage.first_layer, stage.end_layer) for stage in held]
        for name in sorted(whole.parameters_of(ranges) | whole.buffers_of(ranges)):
            holders.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in holders.items()}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [
        tensor for item in (value.values() if isinstance(value, dict) else value) for tensor in _tensors(item)
    ]

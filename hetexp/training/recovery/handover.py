"""Transfers the training's state to ranks that lack it: JSON through the store, tensors in chunks.

Nothing is pickled, and every tensor keeps its type and its bits: parameters, buffers, the optimizer's moments
and master weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetexp.checkpoint.model_state import first_names, named_parameters
from hetexp.checkpoint.optimizer_state import pack_optimizer, restore_optimizer
from hetexp.comm.communicator import Communicator
from hetexp.data.base import stream_of
from hetexp.optimizer.build import follow_schedule
from hetexp.training.nonfinite.loss_scale import LossScale
from hetexp.training.recovery.carried import Carried
from hetexp.training.saving.resuming import set_total_steps
from hetexp.training.state import Progress, TrainState

if TYPE_CHECKING:
    from hetexp.training.loop import Training

CHUNK_BYTES = 2**24
"""Bytes of the state in one message."""
_KEY = "handover"
_OUTCOME = ("train_loss", "evaluation", "checkpoint", "stopped_early")
_DONE = ("evaluated_at", "saved_at", "logged_at", "stops")


def send_state(training: Training, store: dist.Store, step_ended: bool, tensors: bool, handled: int) -> None:
    """Write the training's progress into the store; only the donor, whose state counts, calls it.

    Args:
        store: of the new group.
        step_ended: whether logging, evaluation and saving of the last step are done, or must be done again.
        tensors: whether a rank needs weights and optimizer state as well.
        handled: number of the last request that was answered.
    """
    state = training.state
    progress = training.progress if step_ended else training.good
    named, packed = state_of(state) if tensors else ({}, None)
    stream = stream_of(state.train_data)
    facts = {
        "progress": {
            "step": progress.step,
            "position": progress.position.to_dict(),
            "more": progress.to_dict(),
        },
        "stream": None if stream is None else stream.saved_at(progress.position),
        "outcome": {key: getattr(training.outcome, key) for key in _OUTCOME},
        "done": {key: getattr(training, key) for key in _DONE},
        "loss_at": list(training.loss_at),
        "total_steps": state.total_steps,
        "handled": handled,
        "loss_scale": state.loss_scale.to_dict() if state.loss_scale is not None else None,
        "time_scale": state.time_scale,
        "limits": training.carried.limits,
        "balancer": training.carried.balancer,
        "optimizer": packed,
        "tensors": [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in named.items()],
    }
    store.set(_KEY, json.dumps(facts))


def receive_state(training: Training, store: dist.Store, donor: int, behind: bool, tensors: bool) -> int:
    """Take over the progress, and if need be the tensors, that the donor wrote; all ranks call it.

    Args:
        donor: rank that called `send_state`.
        behind: whether this rank lacks the tensors.
        tensors: whether any rank lacks them.

    Returns:
        Number of the last request that was answered.

    Raises:
        PeerLostError: a rank is gone meanwhile.
    """
    state, progress = training.state, training.progress
    facts: dict[str, Any] = json.loads(store.get(_KEY))
    if tensors:
        layout = [(name, getattr(torch, kind), tuple(shape)) for name, kind, shape in facts["tensors"]]
        if state.rank == donor:
            named = state_of(state)[0]
            send([named[name] for name, _, _ in layout], state.communicator, donor)
        else:
            received = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in layout}
            send(list(received.values()), state.communicator, donor)
            if behind:
                set_state(state, received, facts["optimizer"])
    raw = facts["progress"]
    progress.__dict__.update(Progress.from_dict(raw["step"], raw["position"], raw["more"]).__dict__)
    training.good = replace(progress)
    if (stream := stream_of(state.train_data)) is not None:
        stream.restore(progress.position, facts["stream"])
    set_total_steps(state, facts["total_steps"])
    follow_schedule(state.schedule, progress.step, progress.position.epoch, progress.schedule)
    for key in _OUTCOME:
        setattr(training.outcome, key, facts["outcome"][key])
    for key in _DONE:
        setattr(training, key, facts["done"][key])
    training.loss_at = (facts["loss_at"][0], facts["loss_at"][1])
    if "float16" in state.plan.precisions:
        state.loss_scale = LossScale.from_dict(facts["loss_scale"]) if facts["loss_scale"] else LossScale()
    else:
        state.loss_scale = None
    if facts["time_scale"] is not None and state.time_scale is None:
        state.time_scale = facts["time_scale"]
        state.backend.start_pacing(facts["time_scale"])
    training.carried = Carried(facts["limits"], facts["balancer"])
    training.carried.put_into(state)
    handled: int = facts["handled"]
    return handled


def state_of(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a training by name, and the rest of the optimizer's state as JSON can hold it."""
    names = first_names(state.model)
    tensors = {f"model/{name}": parameter.detach() for parameter, name in names.items()}
    # Also those buffers that a checkpoint leaves out.
    tensors |= {f"buffer/{name}": buffer.detach() for name, buffer in state.model.named_buffers()}
    moments, packed = pack_optimizer(state.optimizer, names)
    tensors |= {f"optimizer/{name}": tensor.detach() for name, tensor in moments.items()}
    return tensors, packed


def set_state(state: TrainState, tensors: dict[str, Tensor], packed: dict[str, Any]) -> None:
    """Copy the result of another rank's `state_of` into this rank's model and optimizer."""
    parameters = named_parameters(state.model)
    buffers = dict(state.model.named_buffers())
    moments: dict[str, Tensor] = {}
    with torch.no_grad():
        for full, tensor in tensors.items():
            kind, _, name = full.partition("/")
            if kind == "optimizer":
                moments[name] = tensor
            else:
                (parameters[name] if kind == "model" else buffers[name]).copy_(tensor)
    restore_optimizer(moments, packed, state.optimizer, parameters)


def send(tensors: Sequence[Tensor], communicator: Communicator, source: int) -> None:
    """Fill all ranks' tensors on the host with those of `source`, bit for bit; all ranks call it.

    Args:
        tensors: of the same types and shapes on all ranks; on `source` on any device.
    """
    sends = communicator.rank == source
    last, content = -1, torch.empty(0, dtype=torch.uint8)
    for chunk in _chunks([tensor.numel() * tensor.element_size() for tensor in tensors]):
        message = torch.empty(sum(end - start for _, start, end in chunk), dtype=torch.uint8)
        place = 0
        if sends:
            for index, start, end in chunk:
                if index != last:  # copied off the device once, however many chunks it travels in
                    last, tensor = index, tensors[index].detach().cpu().contiguous()
                    content = tensor.reshape(-1).view(torch.uint8)
                message[place : place + end - start] = content[start:end]
                place += end - start
        message = communicator.broadcast(message, source)
        if not sends:
            for index, start, end in chunk:
                tensors[index].view(-1).view(torch.uint8)[start:end] = message[place : place + end - start]
                place += end - start


def _chunks(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield chunks of at most `CHUNK_BYTES`: tensor, first byte and end of each part."""
    chunk: list[tuple[int, int, int]] = []
    left = CHUNK_BYTES
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + left)
            chunk.append((index, start, end))
            left -= end - start
            start = end
            if not left:
                yield chunk
                chunk, left = [], CHUNK_BYTES
    if chunk:
        yield chunk

"""Each rank's own state under `local_sgd`, in one file a rank of a checkpoint.

A checkpoint holds the synced model and rank 0's optimizer, as under any strategy. To go on to the bit, each
rank also needs its own optimizer's state (`strategy.inner_state=keep`) and the error feedback of its
compression, and all ranks need the outer momentum.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from hetexp.checkpoint.model_state import first_names, named_parameters
from hetexp.checkpoint.optimizer_state import pack_optimizer, restore_optimizer
from hetexp.strategy.local_sgd.outer import OuterStep
from hetexp.strategy.local_sgd.settings import LocalSettings
from hetexp.training.saving.random_states import padded_bytes
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**24
"""Bytes of a rank's state in one message."""
FEEDBACK, MOMENTUM = "wire/feedback", "outer/momentum"


def file_name(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint folder."""
    return f"rank_{rank}.safetensors"


def rank_files(state: TrainState, outer: OuterStep, settings: LocalSettings) -> dict[str, bytes]:
    """Return the files of all ranks by name, on rank 0.

    All ranks call it: their states travel to rank 0.
    """
    tensors: dict[str, torch.Tensor] = {}
    packed: dict[str, Any] | None = None
    if settings.inner_state == "keep" and state.rank > 0:
        moments, packed = pack_optimizer(state.optimizer, first_names(state.model))
        tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    if outer.exchange.feedback is not None:
        tensors[FEEDBACK] = outer.exchange.feedback
    if outer.momentum is not None and state.rank == 0:
        tensors[MOMENTUM] = outer.momentum
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    contents = gather_bytes(state, safetensors.torch.save(copies, {"optimizer": json.dumps(packed)}))
    return {file_name(rank): content for rank, content in enumerate(contents)}


def restore_rank(
    state: TrainState, begin: Callable[[], OuterStep], settings: LocalSettings, folder: Path
) -> None:
    """Restore this rank's own state from a checkpoint whose model and optimizer have been loaded.

    A checkpoint of another number of ranks, or of another strategy, has no such state: the optimizer then
    goes on from rank 0's state, without error feedback.

    Args:
        begin: returns the outer step.
    """
    first = folder / file_name(0)
    if not first.is_file():
        return
    outer = begin()
    saved = len(list(folder.glob("rank_*.safetensors")))
    with safe_open(first, "pt", "cpu") as file:
        if MOMENTUM in file.keys():  # noqa: SIM118 - it is no mapping
            outer.momentum = file.get_tensor(MOMENTUM).clone()
    if saved != state.communicator.world_size:
        if state.rank == 0:
            log.warning(
                "resume: the checkpoint is of %d ranks, which are now %d: every optimizer goes on from the "
                "state of the first one.",
                saved,
                state.communicator.world_size,
            )
        return
    with safe_open(folder / file_name(state.rank), "pt", "cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        packed = json.loads(file.metadata()["optimizer"])
    if FEEDBACK in tensors and settings.wire != "float32":
        outer.exchange.feedback = tensors[FEEDBACK].clone()
    if packed is not None and settings.inner_state == "keep":
        moments = {n.removeprefix("optimizer/"): t for n, t in tensors.items() if n.startswith("optimizer/")}
        restore_optimizer(moments, packed, state.optimizer, named_parameters(state.model))


def gather_bytes(state: TrainState, content: bytes) -> list[bytes]:
    """Return every rank's bytes on rank 0, and nothing on the others."""
    communicator, exchange = state.communicator, state.exchange
    if exchange is None:
        return [content]
    home = torch.device("cpu") if exchange.takes_host else state.device
    padded, lengths = padded_bytes(communicator, content)
    contents: list[list[bytes]] = [[] for _ in lengths]
    for chunk in padded.split(CHUNK_BYTES):
        for rank, part in enumerate(exchange.gather(chunk.to(home))):
            if communicator.rank == 0:
                contents[rank].append(part.cpu().numpy().tobytes())
    if communicator.rank:
        return []
    return [b"".join(chunks)[:length] for chunks, length in zip(contents, lengths, strict=True)]

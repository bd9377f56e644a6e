"""What differs from rank to rank under `local_sgd`, in one file a rank of a checkpoint.

A checkpoint holds the synced model and rank 0's optimizer, as any other. To go on to the bit, each rank needs
its own optimizer's state (`strategy.inner_state=keep`) and what its wire has lost, and all of them the outer
momentum.
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
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

PIECE_BYTES = 2**24
"""Of a rank's state that travel in one message."""
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
        found, packed = pack_optimizer(state.optimizer, first_names(state.model))
        tensors |= {f"optimizer/{name}": tensor for name, tensor in found.items()}
    if outer.exchange.feedback is not None:
        tensors[FEEDBACK] = outer.exchange.feedback
    if outer.momentum is not None and state.rank == 0:
        tensors[MOMENTUM] = outer.momentum
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    mine = safetensors.torch.save(copies, {"optimizer": json.dumps(packed)})
    everyone = _to_first(state, mine)
    return {file_name(rank): content for rank, content in enumerate(everyone)}


def restore_rank(
    state: TrainState, begin: Callable[[], OuterStep], settings: LocalSettings, folder: Path
) -> None:
    """Put this rank's own state back, from a checkpoint whose model and optimizer have been loaded.

    A checkpoint of other ranks, or of another strategy, has none for it: its optimizer goes on from rank 0's
    state, and what the wire had lost is lost.

    Args:
        begin: returns what the ranks hold in common.
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
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        packed = json.loads(file.metadata()["optimizer"])
    if FEEDBACK in found and settings.wire != "float32":
        outer.exchange.feedback = found[FEEDBACK].clone()
    if packed is not None and settings.inner_state == "keep":
        moments = {n.removeprefix("optimizer/"): t for n, t in found.items() if n.startswith("optimizer/")}
        restore_optimizer(moments, packed, state.optimizer, named_parameters(state.model))


def _to_first(state: TrainState, mine: bytes) -> list[bytes]:
    """Return every rank's bytes on rank 0, and nothing on the others."""
    communicator, exchange = state.communicator, state.exchange
    if exchange is None:
        return [mine]
    home = torch.device("cpu") if exchange.takes_host else state.device
    sizes = torch.zeros(communicator.world_size, dtype=torch.int64)
    sizes[communicator.rank] = len(mine)
    lengths = communicator.all_reduce(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone: list[list[bytes]] = [[] for _ in lengths]
    for piece in padded.split(PIECE_BYTES):
        for rank, part in enumerate(exchange.gather(piece.to(home))):
            if communicator.rank == 0:
                everyone[rank].append(part.cpu().numpy().tobytes())
    if communicator.rank:
        return []
    return [b"".join(pieces)[:length] for pieces, length in zip(everyone, lengths, strict=True)]

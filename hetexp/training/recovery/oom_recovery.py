"""Recovery of all ranks when one of them runs out of memory in a step.

That rank ends the exchange with NaN for its missing gradients. So every rank sees a gradient that is not
finite, and none steps. Only then do they report whose memory ran out: a successful step costs nothing. That
rank halves its microbatches, and all ranks do the step again with the same samples. If it cannot halve them,
the run ends. Losses and samples are those of an undisturbed run; random numbers (dropout) go on from where
they were, and buffers (running statistics) are restored before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.core.errors import HetexpError, PeerLostError
from hetexp.data.loader import chop, cut
from hetexp.data.samples import Microbatch
from hetexp.hardware.emulation.pacing import tensors
from hetexp.hardware.memory.out_of_memory import first_line, is_out_of_memory
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

FIX = (
    "Choose a smaller model or an optimizer with less state, give the device less of the batch "
    "(balancing=manual), leave it out, or free the memory that other programs hold."
)


class DeviceMemoryError(HetexpError):
    """A device runs out of memory, and smaller microbatches cannot help."""


@dataclass(frozen=True)
class OutOfMemory:
    """Memory of this rank's device ran out in a step."""

    reason: str
    """First line of the device's error."""
    free_bytes: int | None
    """Free memory at that moment; `None` if unknown."""


def recovering_guard(state: TrainState, together: bool) -> EmptyShareGuard | None:
    """Return the guard, which then catches out-of-memory errors of the model; `None` if these end the run.

    Args:
        together: whether ranks learn of another's error by the step's gradient. They cannot with
            `trainer.non_finite=continue`, which leaves the gradient unchecked.
    """
    if together and not state.checks_finite and state.communicator.world_size > 1:
        return None
    guard = state.strategy.guard(state.module) if state.strategy.varies_passes() else None
    if guard is not None:
        guard.catches = True
    return guard


def split_microbatches(microbatches: list[Any], most: int | None) -> list[Any]:
    """Return the microbatches, in order, with those of more than `most` samples cut evenly.

    Args:
        microbatches: `(inputs, targets)` each, as a data loader collates them.
    """
    if most is None:
        return microbatches
    return split_by_sizes(
        microbatches, [part for size in sizes_of(microbatches) for part in cut(size, 1, most)]
    )


def split_indices(indices: list[list[int]], most: int | None) -> list[list[int]]:
    """Return the places of samples in the data, cut as `split_microbatches` cuts their microbatches."""
    if most is None:
        return indices
    return [list(part) for places in indices for part in chop(places, cut(len(places), 1, most))]


def split_by_sizes(microbatches: list[Any], sizes: list[int]) -> list[Any]:
    """Return the microbatches cut to these sizes, in order; none may span two of the given ones."""
    parts, left = [], list(sizes)
    for microbatch, size in zip(microbatches, sizes_of(microbatches), strict=True):
        if not size:  # its inputs hold no tensor to cut
            parts.append(microbatch)
        start = 0
        while start < size:
            end = start + left.pop(0)
            whole = end == size and not start
            parts.append(microbatch if whole else part_of(microbatch, start, end))
            start = end
    return parts


def sizes_of(microbatches: list[Any]) -> list[int]:
    """Return the number of samples of each microbatch; 0 if its inputs hold no tensors."""
    return [
        len(microbatch.indices)
        if isinstance(microbatch, Microbatch)
        else next((len(t) for t in tensors(microbatch[0]) if t.dim()), 0)
        for microbatch in microbatches
    ]


def part_of(microbatch: Any, start: int, end: int) -> Any:
    """Return the samples `[start, end)` of a microbatch; those without rows are read and collated again."""
    if isinstance(microbatch, Microbatch):
        return microbatch.part(start, end)
    inputs, targets = microbatch
    return _rows(inputs, start, end), _rows(targets, start, end)


def _rows(value: Any, start: int, end: int) -> Any:
    """Return the samples `[start, end)` of inputs or targets whose tensors have a row a sample."""
    if isinstance(value, torch.Tensor):
        return value[start:end] if value.dim() else value
    if isinstance(value, dict):
        return {key: _rows(item, start, end) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not any(isinstance(item, (str, bytes)) for item in value):
        parts = [_rows(item, start, end) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value[start:end]


def halve_on_all_ranks(
    state: TrainState, step: int, microbatches: list[Any], shortage: OutOfMemory | None
) -> bool:
    """Learn from all ranks whether memory ran out, and halve those ranks' microbatches; all ranks call it.

    Args:
        step: number of steps done.
        microbatches: of this rank, in the attempt.
        shortage: of this rank.

    Returns:
        Whether memory ran out on a rank, so that the step must be done again; the same on every rank.

    Raises:
        DeviceMemoryError: on a rank whose microbatch was a single sample.
        PeerLostError: on all other ranks in that case.
    """
    reports = torch.zeros((state.communicator.world_size, 4), dtype=torch.float64)
    if shortage is not None:
        sizes = sizes_of(microbatches)
        free = -1 if shortage.free_bytes is None else shortage.free_bytes
        reports[state.rank] = torch.tensor([1, max(sizes, default=0), sum(sizes), free], dtype=torch.float64)
    rows = [[int(value) for value in row] for row in state.communicator.all_reduce(reports).tolist()]
    hopeless = []
    for rank, (short, size, samples, free) in enumerate(rows):
        if not short:
            continue
        what = _what_happened(state, rank, step, size, samples, None if free < 0 else free)
        if size <= 1:
            hopeless.append((rank, what))
            continue
        state.microbatch_limits[rank] = half = -(-size // 2)
        if state.rank in (0, rank):
            log.warning("%s From now on it is at most %d. All ranks do the step again.", what, half)
    if hopeless:
        # Each rank reports itself, so that the first cause has the text of the device's error.
        local = [what for rank, what in hopeless if rank == state.rank]
        if local and shortage is not None:
            raise DeviceMemoryError(f"{local[0]} {shortage.reason.rstrip('.')}. {FIX}")
        raise PeerLostError(" ".join(what for _, what in hopeless))
    return any(short for short, *_ in rows)


def _what_happened(
    state: TrainState, rank: int, step: int, size: int, samples: int, free_bytes: int | None
) -> str:
    free = f"{free_bytes / 2**20:.1f} MiB were free" if free_bytes is not None else "free memory is not known"
    when = f"in step {step + 1}" if step >= 0 else "before the first step"
    return (
        f"Rank {rank}, {state.plan.devices[rank]}, ran out of memory {when}, with its share of {samples} "
        f"samples in microbatches of {size} ({free})."
    )


def halve_on_this_rank(state: TrainState, step: int, microbatches: list[Any], shortage: OutOfMemory) -> int:
    """Halve this rank's microbatch after memory ran out in a step of its own.

    No other rank waits for it: the others learn of the limit at the next sync.

    Returns:
        The most samples of a pass from now on.

    Raises:
        DeviceMemoryError: the microbatch was a single sample.
    """
    sizes = sizes_of(microbatches)
    size = max(sizes, default=0)
    what = _what_happened(state, state.rank, step, size, sum(sizes), shortage.free_bytes)
    if size <= 1:
        raise DeviceMemoryError(f"{what} {shortage.reason.rstrip('.')}. {FIX}")
    state.microbatch_limits[state.rank] = half = -(-size // 2)
    log.warning("%s From now on it is at most %d. The rank does its step again.", what, half)
    return half


@contextmanager
def fatal_out_of_memory(state: TrainState, step: int, sizes: list[int], why: str) -> Iterator[None]:
    """Turn an out-of-memory error in the block, which cannot be done again, into a full report.

    The other ranks wait for this one until the launcher sees that it has ended, and ends them.

    Args:
        sizes: of this rank's microbatches.
        why: a sentence on why the error ends the run.

    Raises:
        DeviceMemoryError: memory ran out.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        free = state.backend.free_memory_bytes()
        what = _what_happened(state, state.rank, step, max(sizes, default=0), sum(sizes), free)
        raise DeviceMemoryError(f"{what} {why} {first_line(error).rstrip('.')}. {FIX}") from error

"""What the ranks do together when the memory of one of them runs out in a step.

The rank in trouble ends the exchange with NaN for the gradients that it does not have. So every rank sees a
gradient that is not finite, none steps, and only then do they ask each other whose memory it was: a step
that goes well costs nothing. That rank's microbatch halves, and all do the step again with the same samples.
Where it cannot halve, all end together. Losses and samples are those of a run that was not disturbed; random
numbers (dropout) go on from where they were, and buffers (running statistics) are put back before.
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
from hetexp.hardware.emulation.pacing import tensors
from hetexp.hardware.memory.out_of_memory import first_line, is_out_of_memory
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

FIX = (
    "Choose a smaller model or an optimizer with less state, give the device less of the batch "
    "(balancing=manual), leave it out, or free the memory that other programs hold."
)


class DeviceMemoryError(HetexpError):
    """A device's memory does not suffice, and smaller microbatches cannot help."""


@dataclass(frozen=True)
class OutOfMemory:
    """Memory of this rank's device ran out in a step."""

    said: str
    """The device's own words."""
    free_bytes: int | None
    """At that moment; `None` where it is not known."""


def recovering_guard(state: TrainState, together: bool) -> EmptyShareGuard | None:
    """Let the guard keep the model's shortages, and return it; `None` if a shortage ends the run.

    Args:
        together: whether ranks learn of another's shortage by the step's gradient. With
            `trainer.non_finite=continue` the gradient is not checked, so that they could not.
    """
    if together and not state.looks and state.communicator.world_size > 1:
        return None
    guard = state.strategy.guard(state.module) if state.strategy.varies_passes() else None
    if guard is not None:
        guard.catches = True
    return guard


def split_microbatches(microbatches: list[Any], most: int | None) -> list[Any]:
    """Return the microbatches with those of more than `most` samples cut into even pieces, in order.

    Args:
        microbatches: `(inputs, targets)` each, as a data loader collates them.
    """
    if most is None:
        return microbatches
    pieces = []
    for (inputs, targets), size in zip(microbatches, sizes_of(microbatches), strict=True):
        if size <= most:
            pieces.append((inputs, targets))
            continue
        start = 0
        for piece in cut(size, 1, most):
            pieces.append((part_of(inputs, start, start + piece), part_of(targets, start, start + piece)))
            start += piece
    return pieces


def split_indices(indices: list[list[int]], most: int | None) -> list[list[int]]:
    """Return the places of samples in the data, cut as `split_microbatches` cuts their microbatches."""
    if most is None:
        return indices
    return [list(piece) for one in indices for piece in chop(one, cut(len(one), 1, most))]


def split_by_sizes(microbatches: list[Any], sizes: list[int]) -> list[Any]:
    """Return the microbatches cut into pieces of these sizes, in order; no piece spans two of them."""
    pieces, left = [], list(sizes)
    for (inputs, targets), size in zip(microbatches, sizes_of(microbatches), strict=True):
        start = 0
        while start < size:
            end = start + left.pop(0)
            pieces.append(
                (inputs, targets) if end == size and not start else _cut_out(inputs, targets, start, end)
            )
            start = end
    return pieces


def _cut_out(inputs: Any, targets: Any, start: int, end: int) -> tuple[Any, Any]:
    return part_of(inputs, start, end), part_of(targets, start, end)


def sizes_of(microbatches: list[Any]) -> list[int]:
    """Return the number of samples of each microbatch; 0 where its inputs are no tensors."""
    return [next((len(t) for t in tensors(inputs) if t.dim()), 0) for inputs, _ in microbatches]


def part_of(value: Any, start: int, end: int) -> Any:
    """Return some samples of what `torch.utils.data.default_collate` makes of them."""
    if isinstance(value, torch.Tensor):
        return value[start:end] if value.dim() else value
    if isinstance(value, dict):
        return {key: part_of(item, start, end) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not any(isinstance(item, (str, bytes)) for item in value):
        parts = [part_of(item, start, end) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value[start:end]


def halve_together(
    state: TrainState, step: int, microbatches: list[Any], shortage: OutOfMemory | None
) -> bool:
    """Ask all ranks whether memory ran out, and halve the microbatch where it did; all ranks must call it.

    Args:
        step: number of steps done.
        microbatches: of this rank, as they were just tried.
        shortage: of this rank.

    Returns:
        Whether memory ran out on a rank, so that the step must be done again; the same on every rank.

    Raises:
        DeviceMemoryError: on a rank whose microbatch was a single sample.
        PeerLostError: on all others then.
    """
    reports = torch.zeros((state.communicator.world_size, 4), dtype=torch.float64)
    if shortage is not None:
        sizes = sizes_of(microbatches)
        free = -1 if shortage.free_bytes is None else shortage.free_bytes
        reports[state.rank] = torch.tensor([1, max(sizes, default=0), sum(sizes), free], dtype=torch.float64)
    everyone = [[int(value) for value in row] for row in state.communicator.all_reduce(reports).tolist()]
    hopeless = []
    for rank, (short, size, samples, free) in enumerate(everyone):
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
        # Each tells of itself, so that the first cause has the device's own words.
        mine = [what for rank, what in hopeless if rank == state.rank]
        if mine and shortage is not None:
            raise DeviceMemoryError(f"{mine[0]} {shortage.said.rstrip('.')}. {FIX}")
        raise PeerLostError(" ".join(what for _, what in hopeless))
    return any(short for short, *_ in everyone)


def _what_happened(
    state: TrainState, rank: int, step: int, size: int, samples: int, free_bytes: int | None
) -> str:
    free = f"{free_bytes / 2**20:.1f} MiB were free" if free_bytes is not None else "free memory is not known"
    when = f"in step {step + 1}" if step >= 0 else "before the first step"
    return (
        f"Rank {rank}, {state.plan.devices[rank]}, ran out of memory {when}, with its share of {samples} "
        f"samples in microbatches of {size} ({free})."
    )


def halve_alone(state: TrainState, step: int, microbatches: list[Any], shortage: OutOfMemory) -> int:
    """Halve this rank's microbatch after a step of its own that memory did not suffice for.

    No other rank waits for it: they learn of the limit when they meet.

    Returns:
        The most samples of a pass from now on.

    Raises:
        DeviceMemoryError: the microbatch was a single sample.
    """
    sizes = sizes_of(microbatches)
    size = max(sizes, default=0)
    what = _what_happened(state, state.rank, step, size, sum(sizes), shortage.free_bytes)
    if size <= 1:
        raise DeviceMemoryError(f"{what} {shortage.said.rstrip('.')}. {FIX}")
    state.microbatch_limits[state.rank] = half = -(-size // 2)
    log.warning("%s From now on it is at most %d. The rank does its step again.", what, half)
    return half


@contextmanager
def ends_with_shortage(state: TrainState, step: int, sizes: list[int], why: str) -> Iterator[None]:
    """Tell in full what memory ran out in the block: nothing there can be done again.

    The other ranks wait for this one until the launcher, which it tells by ending, ends them.

    Args:
        sizes: of this rank's microbatches.
        why: sentence that says why it ends the run.

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

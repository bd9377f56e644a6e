"""This rank's microbatches, one global batch after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from hetexp.core.split import Split
from hetexp.data.sampler import GlobalSampler, Position


@dataclass(frozen=True)
class LocalBatch:
    """What one rank computes in one optimizer step."""

    microbatches: list[Any]
    """`(inputs, targets)` each, on the host; empty where this rank's share of the batch is empty."""
    local_samples: int
    global_samples: int
    position: Position
    """Where the global sampler stands after this batch."""


def cut(num_samples: int, accumulate: int, microbatch_size: int | None) -> list[int]:
    """Return the sizes of the microbatches of a local batch; they differ by at most one sample.

    Args:
        accumulate: number of pieces, where `microbatch_size` is `None`; never more than samples.
        microbatch_size: most samples of a piece; the number of pieces follows.
    """
    if num_samples == 0:
        return []
    pieces = accumulate if microbatch_size is None else math.ceil(num_samples / microbatch_size)
    pieces = min(pieces, num_samples)
    small, larger = divmod(num_samples, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


def local_batches(
    dataset: Dataset[Any],
    sampler: GlobalSampler,
    start: Position,
    num_steps: int,
    split: Callable[[int], Split],
    rank: int,
    accumulate: int = 1,
    microbatch_size: int | None = None,
    num_workers: int = 0,
) -> Iterator[LocalBatch]:
    """Yield this rank's part of the next `num_steps` global batches.

    Args:
        sampler: draws the same global batches on every rank.
        split: maps the size of a global batch to every rank's count.
        num_workers: processes that load samples ahead.
    """

    def parts() -> Iterator[tuple[list[list[int]], int, Position]]:
        position = start
        for _ in range(num_steps):
            indices, position = sampler.batch(position)
            first, end = split(len(indices)).bounds(rank)
            mine: list[int] = indices[first:end].tolist()
            yield list(chop(mine, cut(len(mine), accumulate, microbatch_size))), len(indices), position

    # The loader walks the same deterministic sequence a second time, so that its processes can read ahead.
    order = (microbatch for microbatches, _, _ in parts() for microbatch in microbatches)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=_Once(order), num_workers=num_workers)
    loaded = iter(loader)
    for microbatches, global_samples, position in parts():
        yield LocalBatch(
            microbatches=[next(loaded) for _ in microbatches],
            local_samples=sum(map(len, microbatches)),
            global_samples=global_samples,
            position=position,
        )


def chop(items: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield consecutive pieces of the given sizes."""
    start = 0
    for size in sizes:
        yield list(items[start : start + size])
        start += size


class _Once:
    """An iterable over a generator; DataLoader takes its batch sampler only as an iterable object."""

    def __init__(self, order: Iterator[list[int]]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return self._order

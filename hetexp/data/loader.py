"""This rank's microbatches, one global batch after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from hetexp.core.split import Split
from hetexp.data.sampler import GlobalSampler, Position

PREFETCH = 2
"""Items that each process of a `DataLoader` loads ahead, torch's own default."""


@dataclass(frozen=True)
class LocalBatch:
    """What one rank computes in one optimizer step."""

    microbatches: list[Any]
    """`(inputs, targets)` each, on the host; empty where this rank's share of the batch is empty."""
    local_samples: int
    global_samples: int
    position: Position
    """Where the global sampler stands after this batch."""
    indices: list[list[int]] = field(default_factory=list)
    """Of each microbatch the places of its samples in the training data."""
    counts: tuple[int, ...] = ()
    """Every rank's samples."""


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
    split: Callable[[int, int], Split],
    rank: int,
    accumulate: int = 1,
    microbatch_size: int | None = None,
    num_workers: int = 0,
    first_step: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[LocalBatch]:
    """Yield this rank's part of the next `num_steps` global batches.

    Args:
        sampler: draws the same global batches on every rank.
        split: maps the number of a step and the size of its global batch to every rank's count. It is asked
            for at most `read_ahead(num_workers)` steps beyond the batch that was yielded last, and must then
            always give the same answer.
        num_workers: processes that load samples ahead.
        first_step: number of the first one.
        collate: makes a microbatch of a list of samples.
    """

    def parts() -> Iterator[tuple[list[list[int]], int, Position, Split]]:
        position = start
        for step in range(first_step, first_step + num_steps):
            indices, position = sampler.batch(position)
            shared = split(step, len(indices))
            first, end = shared.bounds(rank)
            mine: list[int] = indices[first:end].tolist()
            yield (
                list(chop(mine, cut(len(mine), accumulate, microbatch_size))),
                len(indices),
                position,
                shared,
            )

    # The loader walks the same deterministic sequence a second time, so that its processes can read ahead.
    # A step without samples is an item, too: else the loader would run through to the next one with some.
    order = (microbatch for microbatches, *_ in parts() for microbatch in microbatches or [[]])
    loader: DataLoader[Any] = DataLoader(
        _Microbatches(dataset, collate), sampler=_Once(order), batch_size=None, num_workers=num_workers
    )
    loaded = iter(loader)
    for microbatches, global_samples, position, shared in parts():
        items = [next(loaded) for _ in microbatches or [[]]]
        yield LocalBatch(
            microbatches=items if microbatches else [],
            local_samples=sum(map(len, microbatches)),
            global_samples=global_samples,
            position=position,
            indices=microbatches,
            counts=shared.counts,
        )


def read_ahead(num_workers: int) -> int:
    """Return how many steps beyond the present one the loader may have drawn already."""
    return PREFETCH * num_workers


def chop(items: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield consecutive pieces of the given sizes."""
    start = 0
    for size in sizes:
        yield list(items[start : start + size])
        start += size


class _Microbatches(Dataset[Any]):
    """Maps the indices of a microbatch to its samples, collated; none to `None`."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, indices: list[int]) -> Any:
        if not indices:
            return None
        many = getattr(self._dataset, "__getitems__", None)
        return self._collate(many(indices) if many else [self._dataset[index] for index in indices])


class _Once:
    """An iterable over a generator; DataLoader takes its sampler only as an iterable object."""

    def __init__(self, order: Iterator[list[int]]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return self._order

"""This rank's microbatches, one global batch after another."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate as accumulated
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hetexp.core.split import Split
from hetexp.data.in_memory import rows_of
from hetexp.data.page_locked import PageLocked
from hetexp.data.prefetch import is_prefetchable, prefetched
from hetexp.data.sampler import GlobalSampler, Indices, Position

PREFETCH = 2
"""Microbatches that each process of a `DataLoader` loads ahead, torch's own default."""
THREAD_AHEAD = 1
"""Steps that a thread loads ahead, if there are no such processes."""
NOTHING: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class LocalBatch:
    """What one rank computes in one optimizer step."""

    microbatches: list[Any]
    """`(inputs, targets)` each, on the host; empty if this rank's share of the batch is empty."""
    local_samples: int
    global_samples: int
    position: Position
    """Position of the global sampler after this batch."""
    indices: list[list[int]] = field(default_factory=list)
    """Of each microbatch the places of its samples in the training data."""
    counts: tuple[int, ...] = ()
    """Every rank's samples."""


def cut(num_samples: int, accumulate: int, microbatch_size: int | None) -> list[int]:
    """Return the sizes of the microbatches of a local batch; they differ by at most one sample.

    Args:
        accumulate: number of pieces, if `microbatch_size` is `None`; never more than samples.
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
    *,
    prefetch_factor: int = PREFETCH,
    page_locked: bool = False,
    threaded: bool = True,
) -> Generator[LocalBatch, None, None]:
    """Yield this rank's part of the next `num_steps` global batches.

    Samples are loaded by processes if there are any, which live as long as the generator; else by a
    thread, a step ahead, if that changes nothing (`is_prefetchable`, samples collated as by default); else
    when they are asked for. What is yielded is the same. Closing the generator ends processes and thread.

    Args:
        sampler: draws the same global batches on every rank.
        split: maps the number of a step and the size of its global batch to every rank's count. It is asked
            once a step, in order, at most `read_ahead` steps beyond the batch that was yielded last, maybe by
            the thread.
        num_workers: processes that load samples ahead.
        first_step: number of the first one.
        collate: makes a microbatch of a list of samples.
        prefetch_factor: microbatches that each process loads ahead.
        page_locked: whether they are to lie in page-locked memory.
        threaded: whether a thread may be used.
    """
    drawn = _drawn(sampler, start, num_steps, split, rank, accumulate, microbatch_size, first_step)
    if num_workers:
        seeds = torch.Generator().manual_seed(torch.initial_seed() + first_step) if first_step else None
        yield from _by_processes(dataset, drawn, collate, num_workers, prefetch_factor, page_locked, seeds)
        return
    # torch's `DataLoader` draws a number when it begins: else dropout would depend on `num_workers`. Not
    # where a run goes on, which has drawn it at its first step.
    if not first_step:
        torch.empty((), dtype=torch.int64).random_()
    load = _Microbatches(dataset, collate, PageLocked(page_locked))
    batches = (step.filled([load[indices] for indices in step.pieces]) for step in drawn)
    if threaded and _may_thread(dataset, collate):
        yield from prefetched(batches, THREAD_AHEAD)
    else:
        yield from batches


def read_ahead(
    dataset: Dataset[Any],
    num_workers: int = 0,
    prefetch_factor: int = PREFETCH,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> int:
    """Return how many steps beyond the present one the loader may have drawn already; alike on all ranks."""
    if num_workers:
        return prefetch_factor * num_workers
    return THREAD_AHEAD if _may_thread(dataset, collate) else 0


def _may_thread(dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> bool:
    """Tell whether loading in a thread changes nothing; the user's own collate function may draw numbers."""
    return collate is default_collate and is_prefetchable(dataset)


def chop(items: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield consecutive pieces of the given sizes."""
    start = 0
    for size in sizes:
        yield list(items[start : start + size])
        start += size


@dataclass(frozen=True)
class _Step:
    """What is known of a step before its samples are loaded."""

    pieces: list[Indices]
    """Of each microbatch the places of its samples in the training data."""
    global_samples: int
    position: Position
    shared: Split

    def filled(self, microbatches: list[Any]) -> LocalBatch:
        return LocalBatch(
            microbatches=microbatches,
            local_samples=sum(map(len, self.pieces)),
            global_samples=self.global_samples,
            position=self.position,
            indices=[piece.tolist() for piece in self.pieces],
            counts=self.shared.counts,
        )


def _drawn(
    sampler: GlobalSampler,
    position: Position,
    num_steps: int,
    split: Callable[[int, int], Split],
    rank: int,
    accumulate: int,
    microbatch_size: int | None,
    first_step: int,
) -> Iterator[_Step]:
    for step in range(first_step, first_step + num_steps):
        indices, position = sampler.batch(position)
        shared = split(step, len(indices))
        first, end = shared.bounds(rank)
        ends = accumulated(cut(end - first, accumulate, microbatch_size), initial=first)
        pieces = [indices[start:end] for start, end in pairwise(ends)]
        yield _Step(pieces, len(indices), position, shared)


def _by_processes(
    dataset: Dataset[Any],
    drawn: Iterator[_Step],
    collate: Callable[[list[Any]], Any],
    num_workers: int,
    prefetch_factor: int,
    page_locked: bool,
    generator: torch.Generator | None = None,
) -> Iterator[LocalBatch]:
    """Yield the steps, whose microbatches processes load; a thread of torch's locks what they hand over.

    Args:
        generator: draws the seed of these processes; `None`: torch's own one.
    """
    waiting: deque[_Step] = deque()

    def order() -> Iterator[Indices]:
        for step in drawn:
            waiting.append(step)
            # A step without samples is an item, too: else the loader would run through to one with some.
            yield from step.pieces or [NOTHING]

    loader: DataLoader[Any] = DataLoader(
        _Microbatches(dataset, collate, PageLocked(False)),
        sampler=_Once(order()),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=page_locked,
        generator=generator,
    )
    loaded = iter(loader)
    for item in loaded:
        step = waiting.popleft()
        items = [item, *(next(loaded) for _ in step.pieces[1:])]
        yield step.filled(items if step.pieces else [])


class _Microbatches(Dataset[Any]):
    """Maps the indices of a microbatch to its samples, collated; none to `None`."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], memory: PageLocked
    ) -> None:
        self._dataset, self._collate, self._memory = dataset, collate, memory
        self._load: Callable[[Indices], Any] | None = None
        """Found by the process that loads: arrays would be copied on their way to it."""

    def __getitem__(self, indices: Indices) -> Any:
        if not len(indices):
            return None
        if self._load is None:
            rows = rows_of(self._dataset) if self._collate is default_collate else None
            self._load = self._collated if rows is None else partial(rows.take, memory=self._memory)
        return self._load(indices)

    def _collated(self, indices: Indices) -> Any:
        places = indices.tolist()
        many = getattr(self._dataset, "__getitems__", None)
        samples = many(places) if many else [self._dataset[place] for place in places]
        return self._memory.hold(self._collate(samples))


class _Once:
    """An iterable over a generator; DataLoader takes its sampler only as an iterable object."""

    def __init__(self, order: Iterator[Indices]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[Indices]:
        return self._order

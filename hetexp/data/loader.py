"""This rank's microbatches, one global batch after another, and their way to the device.

A data set is asked for this rank's samples alone. A stream is walked by every rank, in the rank itself or in
one loader process, and the samples of other ranks are dropped as they came.
"""

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
from hetexp.data.in_memory import Rows, rows_of
from hetexp.data.page_locked import PageLocked
from hetexp.data.prefetch import may_thread, prefetched
from hetexp.data.sampler import GlobalSampler, Indices, Position
from hetexp.data.samples import Collate, Explained, read, stacks
from hetexp.data.streams.passes import Mark
from hetexp.data.streams.stream import Held, Stream, StreamSampler
from hetexp.torch_private import hide_loader_process

PREFETCH = 2
"""Microbatches that each process of a `DataLoader` loads ahead; torch's default."""
THREAD_AHEAD = 1
"""Steps that a thread loads ahead, without processes."""
NOTHING: Indices = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part of a global batch."""

    microbatches: list[Any]
    """`(inputs, targets)` each, on the host; empty if this rank's share of the batch is empty."""
    local_samples: int
    global_samples: int
    position: Position
    """Position of the global sampler after this batch."""
    indices: list[list[int]] = field(default_factory=list)
    """Indices of each microbatch's samples in the training data."""
    counts: tuple[int, ...] = ()
    """Number of samples of every rank."""
    last: bool = False
    """Whether the data has no further batch."""
    drawn: tuple[float, float] | None = None
    """What all ranks must have drawn alike (`StreamSampler`); `None` unless they walk a stream."""


def cut(num_samples: int, accumulate: int, microbatch_size: int | None) -> list[int]:
    """Return the sizes of the microbatches of a local batch; they differ by at most one sample.

    Args:
        accumulate: number of microbatches, at most one a sample, if `microbatch_size` is `None`.
        microbatch_size: most samples of a microbatch; it determines their number.
    """
    if num_samples == 0:
        return []
    count = accumulate if microbatch_size is None else math.ceil(num_samples / microbatch_size)
    count = min(count, num_samples)
    small, larger = divmod(num_samples, count)
    return [small + 1] * larger + [small] * (count - larger)


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
    """Yield this rank's part of the next `num_steps` global batches, fewer if the data ends before.

    Processes load the samples if `num_workers` is above 0. Otherwise a thread loads them, a step ahead, if
    that changes no result (`is_prefetchable`, default collate function); else they are loaded on demand. The
    yielded batches are the same. Closing the generator ends processes and thread.

    Args:
        sampler: draws the same global batches on every rank.
        split: maps the number of a step and the size of its global batch to every rank's count. It is called
            once a step, in order, at most `read_ahead` steps beyond the last yielded batch, maybe by the
            thread.
        num_workers: processes that load samples ahead; one of them for a stream.
        first_step: number of the first step.
        collate: makes a microbatch of a list of samples; one that is no `Collate` need not make a pair.
        prefetch_factor: microbatches that each process loads ahead.
        page_locked: whether microbatches lie in page-locked memory.
        threaded: whether a thread may be used.
    """
    parts = Parts(split, rank, accumulate, microbatch_size)
    drawn = _drawn(sampler, start, num_steps, parts, first_step)
    if num_workers:
        seeds = torch.Generator().manual_seed(torch.initial_seed() + first_step) if first_step else None
        if isinstance(sampler, StreamSampler):
            steps = range(first_step, first_step + num_steps)
            options = {"prefetch_factor": prefetch_factor, "pin_memory": page_locked, "generator": seeds}
            walk, memory = _Walk(sampler, start, collate), PageLocked(page_locked)
            yield from _by_one_process(walk, steps, parts, memory, options)
            return
        yield from _by_processes(dataset, drawn, collate, num_workers, prefetch_factor, page_locked, seeds)
        return
    # torch's `DataLoader` draws a number when it begins; without this, dropout would depend on `num_workers`.
    # A resumed run has drawn the number at its first step.
    if not first_step:
        torch.empty((), dtype=torch.int64).random_()
    load = _Microbatches(dataset, collate, PageLocked(page_locked))
    batches = (step.filled([load[indices] for indices in step.microbatches], load) for step in drawn)
    if threaded and may_thread(dataset, collate):
        yield from prefetched(batches, THREAD_AHEAD)
    else:
        yield from batches


def read_ahead(
    dataset: Dataset[Any],
    num_workers: int = 0,
    prefetch_factor: int = PREFETCH,
    collate: Callable[[list[Any]], Any] = default_collate,
    in_waits: bool = False,
) -> int:
    """Return the most steps that the loader may have drawn beyond the current one; equal on all ranks.

    Args:
        in_waits: whether a rank may take the next step's samples while it waits for its device.
    """
    if num_workers:
        return prefetch_factor * (1 if isinstance(dataset, Stream) else num_workers)
    return THREAD_AHEAD if in_waits or may_thread(dataset, collate) else 0


def chop(items: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield consecutive parts of the given sizes."""
    start = 0
    for size in sizes:
        yield list(items[start : start + size])
        start += size


@dataclass(frozen=True)
class Parts:
    """How the samples of a global batch become one rank's microbatches; see `local_batches`."""

    split: Callable[[int, int], Split]
    rank: int
    accumulate: int
    microbatch_size: int | None

    def cut(self, step: int, num_samples: int) -> tuple[Split, list[tuple[int, int]]]:
        """Return every rank's count, and the first and the end of each of this rank's microbatches."""
        shared = self.split(step, num_samples)
        first, end = shared.bounds(self.rank)
        ends = accumulated(cut(end - first, self.accumulate, self.microbatch_size), initial=first)
        return shared, list(pairwise(ends))


@dataclass(frozen=True)
class _Step:
    """A step before its samples are loaded."""

    microbatches: list[Indices]
    """Indices of each microbatch's samples in the training data."""
    global_samples: int
    position: Position
    shared: Split
    last: bool = False
    drawn: tuple[float, float] | None = None

    def filled(self, samples: list[Any], load: _Microbatches) -> LocalBatch:
        indices = [places.tolist() for places in self.microbatches]
        return LocalBatch(
            microbatches=samples if load.has_rows else list(map(load.with_indices, samples, indices)),
            local_samples=sum(map(len, self.microbatches)),
            global_samples=self.global_samples,
            position=self.position,
            indices=indices,
            counts=self.shared.counts,
            last=self.last,
            drawn=self.drawn,
        )


def _drawn(
    sampler: GlobalSampler,
    position: Position,
    num_steps: int,
    parts: Parts,
    first_step: int,
) -> Iterator[_Step]:
    for step in range(first_step, first_step + num_steps):
        indices, position = sampler.batch(position)
        if not len(indices):
            return
        shared, bounds = parts.cut(step, len(indices))
        microbatches = [indices[first:end] for first, end in bounds]
        last = sampler.is_over(position)
        yield _Step(microbatches, len(indices), position, shared, last, sampler.drawn)


def _by_processes(
    dataset: Dataset[Any],
    drawn: Iterator[_Step],
    collate: Callable[[list[Any]], Any],
    num_workers: int,
    prefetch_factor: int,
    page_locked: bool,
    generator: torch.Generator | None = None,
) -> Iterator[LocalBatch]:
    """Yield the steps with microbatches that processes load, and that a thread of torch page-locks.

    Args:
        generator: draws the seed of the processes; `None`: torch's default generator.
    """
    waiting: deque[_Step] = deque()

    def order() -> Iterator[Indices]:
        for step in drawn:
            waiting.append(step)
            # A step without samples is an item, too: else the loader would run on to a step with samples.
            yield from step.microbatches or [NOTHING]

    load = _Microbatches(dataset, collate, PageLocked(False))
    loader: DataLoader[Any] = DataLoader(
        load,
        sampler=order(),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=page_locked,
        generator=generator,
    )
    loaded = iter(loader)
    for item in loaded:
        step = waiting.popleft()
        items = [item, *(next(loaded) for _ in step.microbatches[1:])]
        yield step.filled(items if step.microbatches else [], load)


def _by_one_process(
    walk: _Walk, steps: range, parts: Parts, memory: PageLocked, options: dict[str, Any]
) -> Iterator[LocalBatch]:
    """Yield the steps of a stream that one process walks.

    More processes would each have to walk the whole stream.

    Args:
        memory: for microbatches that this process makes.
        options: of the `DataLoader`.
    """
    size = walk.sampler.global_batch_size
    walk.sampler.stream.leave()
    waiting: deque[tuple[int, Split]] = deque()

    def order() -> Iterator[list[tuple[int, int]]]:
        for step in steps:
            shared, bounds = parts.cut(step, size)
            waiting.append((step, shared))
            yield bounds

    loader: DataLoader[Any] = DataLoader(
        walk,
        sampler=order(),
        batch_size=None,
        num_workers=1,
        collate_fn=_unchanged,
        worker_init_fn=_hide_worker,
        **options,
    )
    for drawn, loaded in loader:
        if not drawn.global_samples:
            return
        step, shared = waiting.popleft()
        indices, samples = drawn.indices, Held(drawn.samples)
        load = _Microbatches(samples, walk.collate, memory)
        if drawn.global_samples < size:
            shared, bounds = parts.cut(step, drawn.global_samples)
            indices = [indices[0][first:end] for first, end in bounds]
            loaded = [load[places] for places in indices]
        if drawn.mark is not None:
            walk.sampler.stream.marks.add(drawn.position.epoch, drawn.position.offset, drawn.mark)
        last = walk.sampler.is_over(drawn.position)
        counts = drawn.global_samples, drawn.position, shared
        yield _Step(indices, *counts, last, drawn.drawn).filled(loaded, load)


def _unchanged(item: Any) -> Any:
    return item


def _hide_worker(_: int) -> None:
    """Let a stream see no loader process (`torch.utils.data.get_worker_info`).

    Many divide themselves among such processes, and some shuffle in another order there, even in a single one
    (Hugging Face's `datasets`).
    """
    hide_loader_process()


@dataclass(frozen=True)
class _Drawn:
    """What a loader process has drawn of a stream for a step."""

    indices: list[Indices]
    """Of each of this rank's microbatches; those of all ranks together if the batch is short."""
    global_samples: int
    position: Position
    drawn: tuple[float, float] | None
    samples: dict[int, Any]
    """All ranks' samples of a short batch, of which this rank's part was not known before; this rank's own if
    microbatches may only be cut by collating again."""
    mark: Mark | None
    """Of the position, if the stream can go on there."""


class _Walk(Dataset[Any]):
    """Maps the bounds of a rank's microbatches in the next global batch to these, step after step."""

    def __init__(self, sampler: StreamSampler, start: Position, collate: Callable[[list[Any]], Any]) -> None:
        self.sampler, self.collate = sampler, collate
        self._position = start

    def __getitem__(self, bounds: list[tuple[int, int]]) -> tuple[_Drawn, list[Any]]:
        sampler, collate = self.sampler, self.collate
        indices, self._position = sampler.batch(self._position)
        samples = dict(zip(indices.tolist(), sampler.stream.__getitems__(indices.tolist()), strict=True))
        mark = sampler.stream.marks.last(self._position.epoch, self._position.offset)
        if len(samples) < sampler.global_batch_size:
            return _Drawn([indices], len(indices), self._position, sampler.drawn, samples, mark), []
        parts = [indices[first:end] for first, end in bounds]
        loaded = [collate([samples[place] for place in part.tolist()]) for part in parts]
        has_rows = not isinstance(collate, Collate) or collate.has_rows
        own = {} if has_rows else {place: samples[place] for part in parts for place in part.tolist()}
        return _Drawn(parts, len(indices), self._position, sampler.drawn, own, mark), loaded


class _Microbatches(Dataset[Any]):
    """Maps the indices of a microbatch to its samples, collated; none to `None`."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], memory: PageLocked
    ) -> None:
        self._dataset, self._collate, self._memory = dataset, collate, memory
        self.has_rows = not isinstance(collate, Collate) or collate.has_rows
        """Whether microbatches may be cut by the rows of their tensors, or are not ours to cut."""
        self._load: Callable[[Indices], Any] | None = None
        """Set by the process that loads: arrays would be copied on their way to it."""

    def __getitem__(self, indices: Indices) -> Any:
        if not len(indices):
            return None
        if self._load is None:
            collate = self._collate
            rows = rows_of(self._dataset) if stacks(collate) else None
            self._load = self._collated if rows is None else self._taken(rows)
        return self._load(indices)

    def with_indices(self, batch: tuple[Any, Any], indices: list[int]) -> Any:
        """Return a microbatch that may be cut."""
        assert isinstance(self._collate, Collate)
        dataset = self._dataset
        held = dataset.held(indices) if isinstance(dataset, Stream) else dataset
        return self._collate.with_indices(batch, indices, held)

    def _taken(self, rows: Rows) -> Callable[[Indices], Any]:
        take, collate = partial(rows.take, memory=self._memory), self._collate
        if not isinstance(collate, Collate) or (rows.num_columns == 2 and not collate.has_keys):
            return take  # a pair, or what a script gets
        return lambda indices: collate.pair(take(indices))

    def _collated(self, indices: Indices) -> Any:
        samples, memory, collate = read(self._dataset, indices.tolist()), self._memory, self._collate
        if not memory.enabled:
            return collate(samples)
        if isinstance(collate, (Collate, Explained)):
            return memory.hold(collate(samples, memory.stacked))
        return memory.hold((memory.stacked if collate is default_collate else collate)(samples))

"""Data that can only be walked through: each rank walks the whole stream and takes its samples by position.

All ranks build the same iterable and walk it in the same order. A sample is known by its position in the
epoch, so that a step has the same samples for any devices and shares, and a run goes on at any position: a
rank walks there. While the stream is walked, the generators of Python, NumPy and torch have states of its
own, which the seed and the epoch determine. So a stream that draws random numbers is the same on every rank,
and the training's own random numbers do not depend on it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hetexp.core.errors import ConfigError, must_be
from hetexp.data.sampler import GlobalSampler, Indices, Position
from hetexp.data.streams.passes import (
    AGAIN,
    Mark,
    Marks,
    Pass,
    alike,
    digest,
    is_stateful,
    packed,
    resumed,
    unpacked,
)

log = logging.getLogger(__name__)

SKIPPED_AT_ONCE = 256
"""Samples that are taken at once on the way to a position, and dropped."""
EPOCHS = 2.0**36
"""Factor of the epoch in the number that stands for a position."""


def is_stream(value: Any) -> bool:
    """Return whether data can be walked through again and again, but not indexed.

    An iterator is none: it cannot begin again. Nor is a `DataLoader`, whose items are batches.
    """
    if isinstance(value, IterableDataset):
        return True
    kind = type(value)
    indexed = hasattr(kind, "__getitem__") or isinstance(value, (str, bytes, Mapping, Set, DataLoader))
    return hasattr(kind, "__iter__") and not hasattr(kind, "__next__") and not indexed


class Generated:
    """A stream of which each pass calls a generator function again.

    Args:
        function: takes no more arguments; its attribute `facts` may hold model arguments.
    """

    def __init__(self, function: partial[Iterator[Any]]) -> None:
        self._function = function
        self.facts: Mapping[str, Any] = getattr(function.func, "facts", {})

    def __iter__(self) -> Iterator[Any]:
        return self._function()


class Stream(Dataset[Any]):
    """The samples of an iterable by their positions: those of the last batch that a `StreamSampler` drew.

    Args:
        source: each `iter(source)` begins at the first sample. A method `set_epoch(epoch)` is called before.
            Its optional `__len__` counts the samples of an epoch.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self.source, self.seed = source, 0
        self.length = _length(source)
        """Samples of an epoch by the iterable's own `__len__`; `None`: not known."""
        self.marks = Marks()
        """Of positions from which the stream can go on, if its iterable can."""
        self._pass: Pass | None = None
        self._held: list[Any] = []
        """Samples of the pass from `_start` on."""
        self._start = 0
        self._first: list[Any] = []
        self._lock = threading.RLock()  # a thread that loads ahead may be late to end

    def first(self, count: int) -> list[Any]:
        """Return the first samples of epoch 0, fewer if it has fewer.

        No sample is lost for a walk that begins here, even if the iterable cannot begin again.

        Raises:
            ConfigError: there are none.
        """
        with self._lock:
            if len(self._first) < count:
                self.go_to(0, 0)
                self._first = self._held[: self.hold(count)][:count]
            if not self._first:
                raise ConfigError("`data` must hold at least one sample, but its stream is empty.")
            return self._first[:count]

    def leave(self) -> None:
        """End the walk, before a process is forked: threads that read for it would be missing there."""
        with self._lock:
            self._pass, self._held, self._start = None, [], 0

    def go_to(self, epoch: int, offset: int) -> bool:
        """Go on at a position; return false if the epoch ends before it."""
        with self._lock:
            if self._pass is None or self._pass.epoch != epoch or offset < self._start:
                self._begin(epoch)
            left = offset - self._start - len(self._held)
            if left > 0 and not self._jump(epoch, offset):
                log.info(
                    "The stream of `data` cannot go on at sample %d of epoch %d by a saved state: %d samples "
                    "are read and dropped.",
                    *(offset, epoch, left),
                )
            dropped = min(offset - self._start, len(self._held))
            del self._held[:dropped]
            self._start += dropped
            while self._start < offset:
                assert self._pass is not None
                skipped = len(self._pass.take(min(SKIPPED_AT_ONCE, offset - self._start)))
                self._start += skipped
                if not skipped:
                    return False
            return True

    def _begin(self, epoch: int) -> None:
        self._pass, self._held, self._start = Pass(self.source, epoch, self.seed), [], 0
        self._compare_first(epoch)

    def _jump(self, epoch: int, offset: int) -> bool:
        """Go on from a mark; return false if there is none or the iterable does not go on exactly."""
        mark = self.marks.find(epoch, offset)
        walk = None if mark is None else resumed(self.source, epoch, self.seed, mark)
        if mark is None or walk is None:
            return False
        (self._pass, self._held), self._start = walk, mark.start
        return True

    def hold(self, count: int, batch: int = 0) -> int:
        """Hold `count` samples from the present position on, fewer if the epoch ends; return how many.

        Args:
            batch: samples between two positions that the training may be resumed at; 0: at none.
        """
        assert self._pass is not None, "go_to() comes first"
        with self._lock:
            missing = count - len(self._held)
            if batch and missing > 0 and self._pass.may_mark:
                for end in range(self._start + batch, self._start + count + 1, batch):
                    self._hold_to_mark(end, batch)
                missing = count - len(self._held)
            if missing > 0:
                self._held += self._pass.take(missing)
            return min(len(self._held), count)

    def _hold_to_mark(self, end: int, batch: int) -> None:
        """Hold the samples up to a position, a batch after the one before, and add its mark."""
        assert self._pass is not None
        head = self._start + len(self._held)
        if end <= head:
            return
        start, ahead = max(head, end - AGAIN), max(0, head - (end - batch))
        lead = tuple(map(digest, self._held[-ahead:])) if ahead and start == head else ()
        self._held += self._pass.take(start - head)
        before = self._pass.state()
        samples = self._pass.take(end - start)
        self._held += samples
        if before is not None and len(samples) == end - start:
            self.marks.add(self._pass.epoch, end, Mark(start, *before, tuple(map(digest, samples)), lead))

    def saved_at(self, position: Position) -> dict[str, Any] | None:
        """Return what lets another walk go on at a position, as plain JSON types; `None`: nothing does."""
        with self._lock:
            mark = self.marks.find(position.epoch, position.offset)
            return None if mark is None else packed(mark, self.seed)

    def restore(self, position: Position, saved: Mapping[str, Any] | None) -> None:
        """Let a walk go on at a position by what `saved_at` returned there, if the seed is the same."""
        if saved is not None and saved["seed"] == self.seed and is_stateful(self.source):
            self.marks.add(position.epoch, position.offset, unpacked(saved))

    def __getitem__(self, place: int) -> Any:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[int]) -> list[Any]:
        """Return samples by their positions in the epoch."""
        with self._lock:
            start, held = self._start, self._held
            if any(not start <= place < start + len(held) for place in places):
                raise IndexError(f"a stream holds samples {start} to {start + len(held) - 1} now")
            return [held[place - start] for place in places]

    def held(self, places: Sequence[int]) -> Held:
        """Return samples that stay when the walk goes on."""
        return Held(dict(zip(places, self.__getitems__(places), strict=True)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the pass, which cannot be copied to another process."""
        return self.__dict__ | {"_pass": None, "_held": [], "_start": 0, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.RLock()}

    def _compare_first(self, epoch: int) -> None:
        """Warn if epoch 0 begins with another sample than before: then a resumed run has other batches."""
        if epoch or not self._first or not self.hold(1):
            return
        if not alike(digest(self._first[0]), digest(self._held[0])):
            log.warning(
                "The stream of `data` begins with another sample than at its first pass. Each iter() of it "
                "must begin at the first sample, and a generator of its own needs a seed: else a resumed run "
                "has other batches."
            )


class Held(Dataset[Any]):
    """Samples of a stream that are kept by their positions, for batches that are collated again in parts.

    Args:
        samples: by position in their epoch.
    """

    def __init__(self, samples: Mapping[int, Any]) -> None:
        self._samples = samples

    def __getitem__(self, place: int) -> Any:
        return self._samples[place]


class StreamSampler(GlobalSampler):
    """Cuts each pass through a stream into global batches, in the stream's own order.

    Args:
        stream: holds the samples of the last batch, and one more, or another batch with `drop_last`: whether
            an epoch ends with a batch is known with that batch.
        max_epochs: passes after which no batch follows; `None`: no limit.

    The other arguments are those of `GlobalSampler`; `seed` is the stream's seed.
    """

    def __init__(
        self,
        stream: Stream,
        global_batch_size: int,
        seed: int,
        drop_last: bool = False,
        overfit_batches: int = 0,
        max_epochs: int | None = None,
    ) -> None:
        self.stream, self.max_epochs = stream, max_epochs
        stream.seed = self.seed = seed
        self.global_batch_size, self.drop_last = global_batch_size, drop_last
        self._most = overfit_batches * global_batch_size if overfit_batches else None
        self._needed = global_batch_size if drop_last else 1

    def until(self, max_epochs: int) -> StreamSampler:
        """Return a sampler that ends after so many epochs."""
        overfit = (self._most or 0) // self.global_batch_size
        sizes = self.global_batch_size, self.seed, self.drop_last, overfit
        return StreamSampler(self.stream, *sizes, max_epochs=max_epochs)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of a whole epoch by the stream's own length; `sys.maxsize` if it has none."""
        length = self.stream.length
        if length is None:
            return sys.maxsize
        full, left = divmod(length if self._most is None else min(length, self._most), self.global_batch_size)
        return full if self.drop_last or not left else full + 1

    def steps_left(self, position: Position, epochs: int) -> int:
        """Return the number of batches to the end of so many epochs; `sys.maxsize` without a length."""
        if self.stream.length is None:
            return sys.maxsize
        if position.epoch >= epochs:
            return 0
        here = max(0, self.steps_per_epoch - -(-position.offset // self.global_batch_size))
        return here + (epochs - position.epoch - 1) * self.steps_per_epoch

    def batch(self, position: Position) -> tuple[Indices, Position]:
        """Return the positions [batch] in its epoch of each sample, and the position of the next step.

        Returns none after the last epoch.

        Raises:
            ConfigError: an epoch has no batch.
        """
        while not self.is_over(position):
            epoch, offset = position.epoch, position.offset
            left = self._left(epoch, offset)
            if left >= self._needed:
                size = min(left, self.global_batch_size)
                more = left - size >= self._needed
                after = Position(epoch, offset + size) if more else Position(epoch + 1)
                first = digest(self.stream[offset])
                self.drawn = after.epoch * EPOCHS + after.offset, first
                return np.arange(offset, offset + size), after
            if not offset:
                raise ConfigError(self._why_none(epoch, left))
            position = Position(epoch + 1)
        return np.empty(0, dtype=np.int64), position

    def is_over(self, position: Position) -> bool:
        return self.max_epochs is not None and position.epoch >= self.max_epochs

    def fingerprint(self) -> str:
        """Return rounded digests of the first samples, which ranks compare before they train."""
        return " ".join(f"{digest(sample):.3g}" for sample in self.stream.first(2))

    def _left(self, epoch: int, offset: int) -> int:
        """Hold the samples of a batch, and of those after it that decide whether another one follows."""
        if not self.stream.go_to(0 if self._most is not None else epoch, offset):
            return 0
        count = self.global_batch_size + self._needed
        if self._most is not None:
            return self.stream.hold(min(count, max(0, self._most - offset)))
        return self.stream.hold(count, self.global_batch_size)

    def _why_none(self, epoch: int, left: int) -> str:
        if left:
            accepted = f"at most the {left} samples of the stream where `trainer.drop_last` is true"
            return must_be("trainer.global_batch_size", accepted, self.global_batch_size)
        if not epoch:
            return "`data` must hold at least one sample, but its stream is empty."
        return (
            f"`data` must give its samples in every epoch, but gave none in epoch {epoch}: each iter() "
            "of its stream must begin at the first sample."
        )


def evaluation_batches(
    stream: Stream, global_batch_size: int, seed: int, most: int | None = None
) -> Iterator[Indices]:
    """Yield the positions of each batch of one pass; `stream` holds the samples of the last one.

    Args:
        most: of the batches; `None`: all.
    """
    sampler, position = StreamSampler(stream, global_batch_size, seed, max_epochs=1), Position()
    number = 0
    while not sampler.is_over(position) and number != most:
        indices, position = sampler.batch(position)
        number += 1
        if len(indices):
            yield indices


def _length(source: Any) -> int | None:
    if not hasattr(type(source), "__len__"):
        return None
    try:
        return len(source)
    except (TypeError, NotImplementedError):  # some classes have it only for some of their objects
        return None

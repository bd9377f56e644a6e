"""Takes the next items of an iterator while the step computes: in a thread, or in the step's own waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset, Subset

from hetexp.data.in_memory import rows_of
from hetexp.data.samples import Collate, stacks
from hetexp.data.streams.random_numbers import random_states
from hetexp.data.streams.stream import Stream

T = TypeVar("T")

STOP_SECONDS = 2.0
"""Longest wait for the thread at the end; it finishes a slower item and drops it."""


def is_prefetchable(dataset: Dataset[Any]) -> bool:
    """Return whether a thread may load a data set's samples while the step computes.

    Its class says so by `prefetchable = True` (`hetexp.data.base.DataSource.train`). A subset is like its
    data set, so is what walks through a stream, and rows of tensors are always prefetchable.
    """
    if isinstance(dataset, Stream):
        return bool(getattr(type(dataset.source), "prefetchable", False))
    if type(dataset) is Subset:
        return is_prefetchable(dataset.dataset)
    # The class's attribute: a wrapper that passes the data set's attributes on may add noise to it.
    return bool(getattr(type(dataset), "prefetchable", False)) or rows_of(dataset) is not None


def reads_in_waits(dataset: Dataset[Any], num_workers: int, collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether neither a process nor a thread loads the samples, so that the step's waits may."""
    return not num_workers and not isinstance(dataset, Stream) and not may_thread(dataset, collate)


def may_thread(dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether loading in a thread changes no result; a user's collate function may draw numbers."""
    is_own = collate.is_own if isinstance(collate, Collate) else not stacks(collate)
    return not is_own and is_prefetchable(dataset)


def prefetched(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield the items of an iterator in their order; a thread takes up to `depth` items ahead.

    The thread begins with the first item and ends with this generator, closed or exhausted. An error of the
    iterator is raised here, in its place among the items.
    """
    ahead = _Ahead(items, depth)
    try:
        while (item := ahead.next()) is not _END:
            yield item
    finally:
        ahead.stop()


class InWaits(Generic[T]):
    """The items of an iterator, the next of which can be taken while its consumer waits for a device.

    For samples that a thread must not load, since they may draw random numbers. In the consumer's own thread
    they draw the same ones as without `take`, if the work that is under way draws none.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._taken: list[tuple[T | None, BaseException | None]] = []
        self.states_before: Any = None
        """The states of the random numbers before the item that is taken; `None` without one."""

    def take(self) -> None:
        """Take the next item, unless one is taken. An error of the iterator is raised by `next`."""
        if self._taken:
            return
        self.states_before = random_states()
        try:
            self._taken.append((next(self._items, None), None))
        except Exception as raised:
            self._taken.append((None, raised))

    def next(self) -> T | None:
        """Return the next item, `None` at the end."""
        if not self._taken:
            return next(self._items, None)
        (item, error), self.states_before = self._taken.pop(), None
        if error is not None:
            raise error
        return item


_END: Any = object()


class _Ahead(Generic[T]):
    """The thread and the items that it took.

    The consumer takes the next item itself if the thread has not begun it. On busy cores the thread may be
    late, and waiting for it would take longer than loading a small microbatch.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._items_taken: queue.SimpleQueue[tuple[T, BaseException | None]] = queue.SimpleQueue()
        self._taking = threading.Lock()
        self._taken, self._limit = 0, depth
        self._ended = False
        # Not a semaphore or an event, whose Python code takes longer than the samples of a small step.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wake.put(None)
        # A daemon: a generator that is never closed must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="hetexp-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> T:
        """Return the next item, and let the thread take one more."""
        if self._items_taken.empty() and self._taking.acquire(blocking=False):
            try:
                if self._items_taken.empty():
                    self._take()
            finally:
                self._taking.release()
        item, error = self._items_taken.get()
        if error is not None:
            raise error
        self._limit += 1
        self._wake.put(None)
        return item

    def stop(self) -> None:
        """End the thread; the item that it is taking is dropped."""
        self._ended = True
        self._wake.put(None)
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._ended:
            self._wake.get()
            with self._taking:
                while self._taken < self._limit and not self._ended:
                    self._take()

    def _take(self) -> None:
        item, error = _END, None
        try:
            item = next(self._items, _END)
        except BaseException as raised:
            error = raised
        self._ended |= item is _END
        self._taken += 1
        self._items_taken.put((item, error))

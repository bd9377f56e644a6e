"""Takes the next items of an iterator in a thread while the step computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset, Subset

from hetexp.data.in_memory import rows_of

T = TypeVar("T")

STOP_SECONDS = 2.0
"""Longest wait for the thread at the end; an item that takes longer is finished and thrown away."""


def is_prefetchable(dataset: Dataset[Any]) -> bool:
    """Return whether a thread may load a data set's samples while the step computes.

    Its class says so by `prefetchable = True` (`hetexp.data.base.DataSource.train`); a subset is like what it
    is a subset of, and samples that are rows of tensors always may.
    """
    if type(dataset) is Subset:
        return is_prefetchable(dataset.dataset)
    # Asked of the class: one that wraps a data set, and passes its attributes on, may add noise to it.
    return bool(getattr(type(dataset), "prefetchable", False)) or rows_of(dataset) is not None


def prefetched(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield what an iterator gives, in its order; a thread asks it for up to `depth` items more.

    The thread begins with the first item that is asked for and ends with this generator, closed or exhausted.
    What the iterator raises is raised here, in its place among the items.
    """
    ahead = _Ahead(items, depth)
    try:
        while (item := ahead.next()) is not _END:
            yield item
    finally:
        ahead.stop()


_END: Any = object()


class _Ahead(Generic[T]):
    """The thread and the items that it took.

    The consumer or the thread takes the next item, whichever comes first. On busy cores the thread may be
    late, and waiting for it would take longer than loading a small microbatch.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._items_taken: queue.SimpleQueue[tuple[T, BaseException | None]] = queue.SimpleQueue()
        self._taking = threading.Lock()
        self._taken, self._limit = 0, depth
        self._ended = False
        # Not a semaphore or an event, whose Python code would cost a small step more than its samples do.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wake.put(None)
        # A daemon: a generator that is never closed must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="hetexp-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> T:
        """Return the next item, and let the thread go on by one."""
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
        """End the thread; what it takes at the moment is thrown away."""
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

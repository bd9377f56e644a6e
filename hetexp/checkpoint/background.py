"""Threads that write a checkpoint, or a part of it, while the training goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

from hetexp.core.errors import CheckpointError

T = TypeVar("T")

NICE = 10
"""Niceness of the thread that writes a checkpoint."""


class BackgroundWriter:
    """Runs one write at a time in this process; it needs no other rank."""

    def __init__(self) -> None:
        self._running: Future[object] | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Begin a write; the one before has ended (`wait`)."""
        assert self._running is None

        def run() -> object:
            _yield_to_others()
            return write()

        self._running = _in_thread(run, "hetexp-checkpoint")

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the write that is under way, and return whether it has ended.

        Args:
            seconds: longest wait; `None`: as long as the write takes.

        Raises:
            CheckpointError: the write failed; the next call does not raise it again.
        """
        if self._running is None:
            return True
        if not wait([self._running], seconds).done:
            return False
        error, self._running = self._running.exception(), None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"A checkpoint could not be written: {type(error).__name__}: {error}."
            ) from error
        return True


@contextlib.contextmanager
def beside(function: Callable[[], T]) -> Iterator[Future[T]]:
    """Run a function in a thread while the body of `with` runs, and wait for it at the end of the body.

    On Linux the thread has the niceness of the thread that starts it.

    Yields:
        The function's result, or the error that it raised.
    """
    future = _in_thread(function, "hetexp-beside")
    try:
        yield future
    finally:
        wait([future])


def _in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a daemon thread: unlike a pool's threads, it does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _yield_to_others() -> None:
    """Let the training's threads go first if all cores are busy; only Linux has a priority a thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

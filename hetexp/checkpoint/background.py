"""A thread that writes one checkpoint while the training goes on, and one that does a part of the write."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from hetexp.core.errors import CheckpointError

T = TypeVar("T")

NICE = 10
"""Niceness of the thread."""


class BackgroundWriter:
    """Runs one write at a time; it is this process's own and needs no other rank.

    The thread is a daemon, so that whoever ends the process says how long it waits (`wait`).
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], object]) -> None:
        """Begin a write; the one before has ended (`wait`)."""
        assert self._thread is None

        def run() -> None:
            _yield_to_others()
            try:
                write()
            except BaseException as error:  # raised in the thread that waits
                self._error = error

        self._thread = threading.Thread(target=run, name="hetexp-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the write that is under way, and return whether it has ended.

        Args:
            seconds: at most; `None`: as long as it takes.

        Raises:
            CheckpointError: it failed; the next call does not say so again.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"A checkpoint could not be written: {type(error).__name__}: {error}."
            ) from error
        return True


class Beside(Generic[T]):
    """Runs a function in a thread while the body of `with` runs; it has ended when the body is left.

    A daemon, unlike a pool's threads: it does not keep a process from ending. On Linux it has the niceness of
    the thread that starts it.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._returned: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hetexp-beside", daemon=True)

    def __enter__(self) -> Beside[T]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join()

    def result(self) -> T:
        """Return what the function did, after `with`.

        Raises:
            BaseException: what the function raised.
        """
        if self._error is not None:
            raise self._error
        return self._returned[0]

    def _run(self) -> None:
        try:
            self._returned.append(self._function())
        except BaseException as error:  # raised by `result`
            self._error = error


def _yield_to_others() -> None:
    """Let the training's threads go first where all cores are busy; Linux alone has a priority a thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

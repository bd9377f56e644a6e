"""Calls made in order on their own thread, so that no call can delay or end the training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class BackgroundCalls:
    """Runs calls one after the other on one daemon thread.

    Args:
        name: name of the thread.
        on_error: callback for each error of a call, on that thread.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Approximate number of calls that have not begun."""
        return self._calls.qsize()

    def submit(self, call: Callable[[], object]) -> threading.Event:
        """Queue a call and return at once; the event is set when it has returned or raised."""
        done = threading.Event()
        self._calls.put((call, done))
        return done

    def close(self, timeout_seconds: float) -> bool:
        """End the thread after the queued calls; return False if it has not ended within the time."""
        self._calls.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, done = entry
            try:
                call()
            except BaseException as error:  # a library that calls sys.exit must not end this thread
                self._on_error(error)
            finally:
                done.set()

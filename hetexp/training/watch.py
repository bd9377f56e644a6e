"""What the launcher has decided, and what people ask of the training, known as soon as it is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from hetexp.comm.watched_store import another_connection
from hetexp.core.epoch import LATEST, LATEST_REQUEST, Epoch, Request

_FOR_EVER = timedelta(days=3650)


class Watch:
    """Knows the newest epoch and the newest request; threads with connections of their own wait for them.

    Args:
        store: the launcher's.
        broken: called as soon as an epoch comes that says that a member is gone, before anybody learns of it
            here: a rank that waits for it in a collective leaves it then.
    """

    def __init__(self, store: dist.Store, broken: Callable[[], object] = lambda: None) -> None:
        self._store, self._broken = store, broken
        self._changed = threading.Condition()
        self._epoch = Epoch(self._latest(LATEST), (), "")
        self._urgent = 0
        """Number of the newest epoch that broke a group."""
        self._request = 0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to watch: epochs from the present one on, and requests from the first."""
        for follow in (self._follow_epochs, self._follow_requests):
            thread = threading.Thread(target=follow, name="watch", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def epoch(self) -> int:
        """Number of the newest epoch."""
        return self._epoch.number

    @property
    def request(self) -> int:
        """Number of the newest request; 0: there was none."""
        return self._request

    def broken_since(self, number: int) -> bool:
        """Tell whether a member of that epoch is gone."""
        return self._urgent > number

    def newest_after(self, number: int, seconds: float) -> Epoch | None:
        """Return the newest epoch once there is one beyond this number; `None`: none came in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._epoch.number <= number:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, 1.0))  # a signal's handler runs in between
            return self._epoch

    def read_request(self, number: int) -> Request:
        """Return a request that has been told of."""
        return Request.from_json(self._store.get(Request.key(number)))

    def _latest(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _follow_epochs(self) -> None:
        store, number = another_connection(self._store), self._epoch.number
        while True:
            number += 1
            try:
                store.wait([Epoch.key(number)], _FOR_EVER)
                epoch = Epoch.from_json(store.get(Epoch.key(number)))
            except RuntimeError:  # the launcher is gone, and this process about to follow it
                return
            if epoch.urgent:
                self._broken()
            with self._changed:
                self._epoch = epoch
                if epoch.urgent:
                    self._urgent = number
                self._changed.notify_all()

    def _follow_requests(self) -> None:
        store, number = another_connection(self._store), self._latest(LATEST_REQUEST)
        while True:
            self._request = number
            number += 1
            try:
                store.wait([Request.key(number)], _FOR_EVER)
            except RuntimeError:
                return

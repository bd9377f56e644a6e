"""Watches the store for the launcher's epochs and the user's requests.

A thread polls the store. It does not wait there for a key: the store wakes waiting clients one by one, and a
client that has just died can block the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from hetexp.comm.connections.watched_store import another_connection
from hetexp.core.epoch import LATEST, LATEST_REQUEST, Epoch, Request, SignedStore

LOOK_SECONDS = 0.1
"""Pause between two looks: a rank with live peers learns of another's loss at most this much later."""
HURRIED_SECONDS = 0.005
"""The same pause if this rank waits for an epoch."""


class LauncherNews:
    """The newest epoch and the newest request, polled by a thread with its own connection.

    Args:
        store: the launcher's.
        secret: by which the launcher signs (`SignedStore`).
        broken: called first with an epoch that says that a member is gone, so that a rank that waits for
            that member in a collective leaves it; it must not wait.
    """

    def __init__(
        self, store: dist.Store, secret: str, broken: Callable[[Epoch], object] = lambda epoch: None
    ) -> None:
        self._store, self._secret, self._broken = store, secret, broken
        self._changed = threading.Condition()
        self._epoch = Epoch(self._latest(SignedStore(store, secret), LATEST), (), "")
        self._urgent = 0
        """Number of the newest epoch that broke a group."""
        self._request = 0
        self._hurry = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def start(self) -> None:
        """Start to poll for epochs and requests after the present ones."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling: a process that ends with a thread inside torch's store may abort."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def epoch(self) -> int:
        """Number of the newest epoch."""
        return self._epoch.number

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the newest epoch; empty before the first change."""
        return self._epoch.members

    @property
    def request(self) -> int:
        """Number of the newest request; 0: there was none."""
        return self._request

    def broken_since(self, number: int) -> bool:
        """Return whether a member of that epoch is gone."""
        return self._urgent > number

    def newest_after(self, number: int, seconds: float) -> Epoch | None:
        """Wait for an epoch beyond this number and return the newest; `None` if none comes in time."""
        deadline = time.monotonic() + seconds
        self._hurry.set()
        try:
            with self._changed:
                while self._epoch.number <= number:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._changed.wait(min(left, 1.0))  # a signal's handler runs in between
                return self._epoch
        finally:
            self._hurry.clear()

    @staticmethod
    def _latest(store: SignedStore, key: str) -> int:
        return int(store.read(key) or 0)

    def _look(self) -> None:
        store = SignedStore(another_connection(self._store), self._secret)
        request = self._latest(store, LATEST_REQUEST)
        pause = threading.Event()
        while not self._over.is_set():
            try:
                if (text := store.read(Epoch.key(self._epoch.number + 1))) is not None:
                    self._take(Epoch.from_json(text))
                    continue
                while store.read(Request.key(request + 1)) is not None:
                    request += 1
                self._request = request
            except RuntimeError:  # the launcher is gone, and this process about to follow it
                return
            if self._hurry.is_set():
                pause.wait(HURRIED_SECONDS)
            else:
                self._hurry.wait(LOOK_SECONDS)

    def _take(self, epoch: Epoch) -> None:
        if epoch.urgent:
            self._urgent = epoch.number  # first: a group that begins to form just now must see it
            self._broken(epoch)
        with self._changed:
            self._epoch = epoch
            self._changed.notify_all()

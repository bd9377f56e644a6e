"""A store whose waits end if the membership has changed, so that their keys will never come."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hetexp.comm.connections.revocation import Revocation
from hetexp.core.errors import PeerLostError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
"""Seconds between two looks at a key, at first and later."""


class WatchedStore(dist.Store):
    """A view of a store under a prefix; torch's own code can use it to form gloo's groups.

    It never blocks in the store itself, so that several threads may use one connection.

    Args:
        store: the launcher's.
        prefix: of each key.
        obsolete: returns whether the membership has changed; waits then raise.

    Attributes:
        revocation: whether this rank has given up the group that meets in the store.
    """

    def __init__(self, store: dist.Store, prefix: str, obsolete: Callable[[], bool]) -> None:
        super().__init__()
        self._store: Any = store
        self._prefix, self._obsolete = prefix, obsolete
        self.revocation = Revocation()

    def obsolete(self) -> bool:
        """Return whether the membership has changed."""
        return self._obsolete()

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        """Return once all keys exist.

        Raises:
            PeerLostError: the membership has changed meanwhile.
            RuntimeError: they did not come in time.
        """
        prefixed = [self._prefix + key for key in keys]
        deadline, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE
        while not self._store.check(prefixed):
            if self._obsolete():
                raise PeerLostError(f"the members of this training have changed while {keys} did not come")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{keys} did not come within {timeout.total_seconds():g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(self._prefix + key)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [self._store.get(self._prefix + key) for key in keys]

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._prefix + key, value)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._prefix + key, amount))

    def append(self, key: str, value: Any) -> None:
        self._store.append(self._prefix + key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value: bytes = self._store.compare_set(self._prefix + key, expected, desired)
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._prefix + key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        return True


def another_connection(store: dist.Store) -> dist.Store:
    """Return the same store for another thread, whose waits do not block this one."""
    if isinstance(store, WatchedStore):
        return store
    clone: Any = store.clone  # type: ignore[attr-defined]  # missing in torch's stubs
    other: dist.Store = clone()
    return other

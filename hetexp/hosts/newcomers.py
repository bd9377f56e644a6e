"""Connections that have yet to show who they are: of too many the oldest goes, and never the newest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Newcomers(Generic[T]):
    """These connections, in the order in which they came. Honest ones show soon who they are, and stay few.

    Args:
        most: connections at a time.
        most_of_address: those of one address.
        drop: closes a connection.
    """

    def __init__(self, most: int, most_of_address: int, drop: Callable[[T], None]) -> None:
        self._most, self._most_of_address, self._drop = most, most_of_address, drop
        self._addresses: dict[T, str] = {}
        self._lock = threading.Lock()

    def add(self, connection: T, address: str) -> None:
        """Add the newest connection; drop the oldest, of its address or of all, if there are too many."""
        with self._lock:
            same = [one for one, other in self._addresses.items() if other == address]
            candidates = same if len(same) >= self._most_of_address else [*self._addresses]
            if candidates is same or len(candidates) >= self._most:
                del self._addresses[candidates[0]]
                self._drop(candidates[0])
            self._addresses[connection] = address

    def remove(self, connection: T) -> None:
        """Keep a connection from being dropped: it has shown who it is, or has ended."""
        with self._lock:
            self._addresses.pop(connection, None)

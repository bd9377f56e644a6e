"""Shuts gloo's connections at once, also while a thread waits in a collective: torch cannot (2.13).

A rank whose peer has died leaves its collective within milliseconds, as the peer's sockets close. A rank that
waits for a living rank that has left the group would wait until `comm.timeout_seconds`: the sockets stay open
as long as anything refers to the group. If either end shuts them, every waiting rank fails at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = Path("/proc/self/fd")
_open: set[int] = set()
"""Inodes of the sockets of all groups that this process has formed."""


@contextmanager
def remembered() -> Iterator[None]:
    """Remember the sockets that the block opens, so that `shut_all` finds them."""
    before = _sockets()
    try:
        yield
    finally:
        _open.update(_sockets().keys() - before.keys())


def shut_all() -> int:
    """Shut every connection that was opened in a `remembered` block, and return how many were open.

    Safe from any thread and at any time: collectives on them fail, here and on the other end. Does nothing on
    a system without `/proc`.
    """
    shut = 0
    for inode, number in _sockets().items():
        if inode not in _open:
            continue
        with suppress(OSError):
            duplicate = os.dup(number)
            # By now the number may be another file's.
            if os.fstat(duplicate).st_ino != inode:
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as connection:
                connection.getpeername()  # fails for a listening socket, which stays open
                connection.shutdown(socket.SHUT_RDWR)
                shut += 1
    _open.clear()
    return shut


def _sockets() -> dict[int, int]:
    """Return this process's open sockets: file number by inode."""
    sockets: dict[int, int] = {}
    if not _FOLDER.is_dir():
        return sockets
    for entry in _FOLDER.iterdir():
        with suppress(OSError):
            kind, _, inode = str(entry.readlink()).partition(":")
            if kind == "socket":
                sockets[int(inode.strip("[]"))] = int(entry.name)
    return sockets

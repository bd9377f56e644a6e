"""Raw bytes between two connections: how a rank reaches the store, which is on the leader's loopback only."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from hetexp.cluster.wire import accepted, shut

PIECE = 2**16


class Forward:
    """A port of this machine's loopback whose connections are carried to the leader.

    Args:
        connect: returns a new connection to the leader's store.
    """

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="forward", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all its connections."""
        shut(self._listener)
        self._thread.join()
        for connection in list(self._open):
            shut(connection)

    def _accept(self) -> None:
        for connection, _ in accepted(self._listener):
            self._open.add(connection)
            threading.Thread(target=self._carry, args=(connection,), name="forwarded", daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        try:
            far = self._connect()
        except Exception:  # whatever it is, the rank sees its connection end, and tries again
            self._open.discard(near)
            shut(near)
            return
        self._open.add(far)
        try:
            join_both(near, far)
        finally:
            self._open -= {near, far}


def join_both(one: socket.socket, other: socket.socket) -> None:
    """Carry all bytes between two connections until one of them ends, and close both."""
    for connection in (one, other):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_carry, args=(other, one), name="back", daemon=True)
    back.start()
    _carry(one, other)
    back.join()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    for connection in (source, target):
        shut(connection)

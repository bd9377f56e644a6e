"""Raw bytes between two connections: how a rank reaches the store, which is on the leader's loopback only."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from hetexp.core.errors import logged
from hetexp.hosts.channel import Listener, close_socket

CHUNK_BYTES = 2**16


class PortForward(Listener):
    """A port of this machine's loopback that forwards connections to the leader.

    Args:
        connect: returns a new connection to the leader's store.
    """

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        super().__init__(("127.0.0.1", 0), self._forward)

    def _forward(self, near: socket.socket, _: str) -> bool:
        with logged("a forwarded connection ended"):  # the rank sees that, and tries again
            relay(near, self._connect(), self.open)
        return False


def relay(near: socket.socket, far: socket.socket, opened: set[socket.socket]) -> None:
    """Copy all bytes between two connections in both directions until one of them ends, and close both.

    Args:
        opened: contains the far connection meanwhile.
    """
    opened.add(far)
    for connection in (near, far):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_copy, args=(far, near), name="back", daemon=True)
    back.start()
    _copy(near, far)
    back.join()
    opened.discard(far)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
    for connection in (source, target):
        close_socket(connection)

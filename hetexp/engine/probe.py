"""How fast the network between the hosts of a job is: rank 0 asks one rank of each other host."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hetexp.hardware.catalogue import Link

ENOUGH_SECONDS = 0.25
"""A message that takes so long tells the rate: a shaper may let shorter ones through at once."""
FIRST_BYTES, MOST_BYTES = 2**16, 2**28
ROUND_TRIPS = 5
LIMIT_SECONDS = 20.0
_LENGTH, _TOKEN = 8, 16


class ProbeServer:
    """Takes in what one client sends and answers each message with a byte; a thread does it.

    Args:
        address: of this host, to listen on.
    """

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(_TOKEN // 2)
        """What the client must send first."""
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="probe", daemon=True).start()

    def close(self) -> None:
        """Stop to listen."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        try:
            client, _ = self._listener.accept()
            with client:
                client.settimeout(LIMIT_SECONDS)
                if _read(client, _TOKEN) != self.token.encode():
                    return
                while True:
                    self._take(client, int.from_bytes(_read(client, _LENGTH), "big"))
                    client.sendall(b"\0")
        except OSError:  # the client has ended, or nobody came
            return

    def _take(self, client: socket.socket, length: int) -> None:
        buffer = memoryview(bytearray(FIRST_BYTES))
        while length:
            taken = client.recv_into(buffer[: min(length, FIRST_BYTES)])
            if not taken:
                raise OSError("the client is gone")
            length -= taken


def measured(address: str, port: int, token: str) -> Link:
    """Return latency and rate of the way to a `ProbeServer`.

    Raises:
        OSError: it does not answer.
    """
    with socket.create_connection((address, port), timeout=LIMIT_SECONDS) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.sendall(token.encode())
        trip = min(_send(server, 1) for _ in range(ROUND_TRIPS))
        size, seconds = FIRST_BYTES, 0.0
        while seconds < ENOUGH_SECONDS and size < MOST_BYTES:
            size *= 2
            seconds = _send(server, size)
    rate = size / max(seconds - trip, 1e-9)
    source = f"measured between the hosts, {size} bytes in {seconds:.3g} s"
    return Link(gb_per_second=rate / 1e9, efficiency=1.0, latency_seconds=trip / 2, source=source)


def slowest(told: Sequence[dict[str, Any]]) -> Link | None:
    """Return the slowest link from rank 0's host to the others'; `None` where all are on one.

    Args:
        told: by every rank, with the `probe` of one rank of each host.

    Raises:
        OSError: a host does not answer.
    """
    others = {one["node"]: one for one in reversed(told) if one["probe"] and one["node"] != told[0]["node"]}
    links = [measured(one["address"], *one["probe"]) for one in others.values()]
    if not links:
        return None
    latency = max(link.latency_seconds for link in links)
    return min(links, key=lambda link: link.gb_per_second).model_copy(update={"latency_seconds": latency})


def _send(server: socket.socket, length: int) -> float:
    """Return the seconds from the first byte of a message to its answer."""
    piece = bytes(min(length, FIRST_BYTES))
    started = time.perf_counter()
    server.sendall(length.to_bytes(_LENGTH, "big"))
    for _ in range(length // len(piece)):
        server.sendall(piece)
    _read(server, 1)
    return time.perf_counter() - started


def _read(connection: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        piece = connection.recv(length - len(found))
        if not piece:
            raise OSError("the other end is gone")
        found += piece
    return found

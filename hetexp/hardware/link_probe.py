"""How fast the network between two hosts is: one sends messages over a connection, the other answers each."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from hetexp.hardware.catalogue import Link

ENOUGH_SECONDS = 0.25
"""A message that takes so long tells the rate: a shaper may let shorter ones through at once."""
FIRST_BYTES, MOST_BYTES = 2**16, 2**28
ROUND_TRIPS = 5
LIMIT_SECONDS = 20.0
"""Longest wait for the other end."""
_LENGTH = 8


def answer(connection: socket.socket) -> None:
    """Take in what the other end sends and answer each message with a byte, until that end closes.

    Raises:
        OSError: it was silent for too long.
    """
    connection.settimeout(LIMIT_SECONDS)
    while length := int.from_bytes(received(connection, _LENGTH), "big"):
        _take(connection, length)
        connection.sendall(b"\0")


def measured(connection: socket.socket) -> Link:
    """Return latency and rate of the network to the answering end, and let that end go.

    Raises:
        OSError: it does not answer.
    """
    connection.settimeout(LIMIT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trip = min(_send(connection, 1) for _ in range(ROUND_TRIPS))
    size, seconds = FIRST_BYTES, 0.0
    while seconds < ENOUGH_SECONDS and size < MOST_BYTES:
        size *= 2
        seconds = _send(connection, size)
    connection.sendall(bytes(_LENGTH))
    rate = size / max(seconds - trip, 1e-9)
    source = f"measured between the hosts, {size} bytes in {seconds:.3g} s"
    return Link(gb_per_second=rate / 1e9, efficiency=1.0, latency_seconds=trip / 2, source=source)


def slowest(links: Sequence[Link]) -> Link | None:
    """Return the least rate with the longest latency; `None` if there is no link."""
    if not links:
        return None
    latency = max(link.latency_seconds for link in links)
    return min(links, key=lambda link: link.gb_per_second).model_copy(update={"latency_seconds": latency})


def in_words(link: Link) -> str:
    """Return what was measured, as a plan's reason."""
    rate, latency = link.gb_per_second * 8e3, link.latency_seconds * 1e3
    return f"The network between the hosts has {rate:,.0f} Mbit/s after {latency:.2g} ms, as measured."


def received(connection: socket.socket, length: int, deadline: float | None = None) -> bytes:
    """Return so many bytes.

    Args:
        deadline: when all of them must have come, by the monotonic clock; `None`: the socket's own timeout.

    Raises:
        OSError: the other end is gone, or too slow.
    """
    pieces, left = [], length
    while left:
        if deadline is not None:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("it did not answer in time")
            connection.settimeout(seconds)
        piece = connection.recv(min(left, FIRST_BYTES))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _take(connection: socket.socket, length: int) -> None:
    buffer = memoryview(bytearray(FIRST_BYTES))
    while length:
        taken = connection.recv_into(buffer[: min(length, FIRST_BYTES)])
        if not taken:
            raise OSError("the other end is gone")
        length -= taken


def _send(connection: socket.socket, length: int) -> float:
    """Return the seconds from the first byte of a message to its answer."""
    piece = bytes(min(length, FIRST_BYTES))
    started = time.perf_counter()
    connection.sendall(length.to_bytes(_LENGTH, "big"))
    for _ in range(length // len(piece)):
        connection.sendall(piece)
    received(connection, 1)
    return time.perf_counter() - started

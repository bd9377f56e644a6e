"""Measures the network between two hosts: one sends messages, the other answers each of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from hetexp.hardware.catalogue import Link

ENOUGH_SECONDS = 0.25
"""Shortest time of the message that gives the rate: a shaper may let shorter messages through at once."""
FIRST_BYTES, MOST_BYTES = 2**16, 2**28
ROUND_TRIPS = 5
LIMIT_SECONDS = 20.0
"""Longest wait for the other end."""
_LENGTH = 8


def answer(connection: socket.socket) -> None:
    """Receive messages and answer each with a byte, until the other end closes the connection.

    Raises:
        OSError: the other end was silent for too long.
    """
    connection.settimeout(LIMIT_SECONDS)
    while length := int.from_bytes(received(connection, _LENGTH), "big"):
        _take(connection, length)
        connection.sendall(b"\0")


def measured(connection: socket.socket) -> Link:
    """Return latency and rate of the network to the answering end, and end its `answer`.

    Raises:
        OSError: the other end does not answer.
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
    """Return a link with the least rate and the longest latency; `None` without links."""
    if not links:
        return None
    latency = max(link.latency_seconds for link in links)
    return min(links, key=lambda link: link.gb_per_second).model_copy(update={"latency_seconds": latency})


def in_words(link: Link) -> str:
    """Return the measured network as a reason of a plan."""
    rate, latency = link.gb_per_second * 8e3, link.latency_seconds * 1e3
    return f"The network between the hosts has {rate:,.0f} Mbit/s after {latency:.2g} ms, as measured."


def received(connection: socket.socket, length: int, deadline: float | None = None) -> bytes:
    """Return so many bytes.

    Args:
        deadline: latest moment, by the monotonic clock; `None`: the socket's own timeout.

    Raises:
        OSError: the other end is gone, or too slow.
    """
    chunks, left = [], length
    while left:
        if deadline is not None:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("it did not answer in time")
            connection.settimeout(seconds)
        chunk = connection.recv(min(left, FIRST_BYTES))
        if not chunk:
            raise ConnectionResetError("it closed the connection")
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def _take(connection: socket.socket, length: int) -> None:
    buffer = memoryview(bytearray(FIRST_BYTES))
    while length:
        taken = connection.recv_into(buffer[: min(length, FIRST_BYTES)])
        if not taken:
            raise OSError("the other end is gone")
        length -= taken


def _send(connection: socket.socket, length: int) -> float:
    """Return the seconds from the first byte of a message to its answer."""
    chunk = bytes(min(length, FIRST_BYTES))
    started = time.perf_counter()
    connection.sendall(length.to_bytes(_LENGTH, "big"))
    for _ in range(length // len(chunk)):
        connection.sendall(chunk)
    received(connection, 1)
    return time.perf_counter() - started

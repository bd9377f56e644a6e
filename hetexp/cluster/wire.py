"""What travels between machines: frames of JSON, after both sides have proved that they know the token.

A frame is its length (four bytes, the most significant first) and so many bytes of JSON. Nothing is
unpickled. Both sides prove themselves by HMAC-SHA256 over both sides' fresh random numbers, with their role
in it, so that no recorded or reflected message proves anything. From then on every frame of a control
connection carries an HMAC over its direction, its number and its bytes under a key of this connection: it
can be read on the way, not changed, repeated or left out. Connections for a `store`, a `probe` or
`files` carry raw bytes after the handshake.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

PROTOCOL = 1
"""Of handshake and messages; machines that differ in it refuse each other."""
GREETING_BYTES = 4 * 2**10
"""Longest frame before the other side has proved itself."""
FRAME_BYTES = 32 * 2**20
"""Longest frame after that: a plan, a piece of a log."""
_LENGTH = struct.Struct(">I")
_MAC_BYTES = hashlib.sha256().digest_size
PURPOSES = ("member", "store", "probe", "files")


class WireError(Exception):
    """What came is not what the other side should send; the connection is of no more use."""


class RefusedError(WireError):
    """The other side does not know the token, or says that this one does not."""


def send_frame(connection: socket.socket, value: Any) -> None:
    """Send a value that JSON can carry."""
    _send(connection, json.dumps(value).encode())


def receive_frame(
    connection: socket.socket, most_bytes: int, deadline: float | None = None
) -> dict[str, Any]:
    """Return the next frame, a JSON object.

    Args:
        deadline: when it must have come whole, by the monotonic clock; `None`: the socket's own timeout.

    Raises:
        WireError: it is longer than allowed, or no JSON object.
        OSError: the connection broke, or the time is over.
    """
    return _parsed(_receive(connection, most_bytes, deadline))


def answer_stranger(connection: socket.socket, token: bytes, seconds: float) -> tuple[str, str, Channel]:
    """Let a stranger prove itself, and prove ourselves to it: the leader's side.

    Returns:
        Its purpose, the name that it gives itself, and the connection as a channel.

    Raises:
        RefusedError: it does not know the token; says how it failed.
        WireError, OSError: it does not speak as it should, or not in time.
    """
    deadline, ours = time.monotonic() + seconds, secrets.token_hex(32)
    connection.settimeout(seconds)
    send_frame(connection, {"hetexp": PROTOCOL, "nonce": ours})
    said = receive_frame(connection, GREETING_BYTES, deadline)
    theirs, purpose, name = (_text(said, key) for key in ("nonce", "purpose", "name"))
    if said.get("hetexp") != PROTOCOL:
        _refuse(
            connection, f"this machine speaks version {PROTOCOL} of the protocol, not {said.get('hetexp')}"
        )
    if len(theirs) != len(ours) or purpose not in PURPOSES:
        raise WireError("no greeting of hetexp")
    if not hmac.compare_digest(_text(said, "proof"), _proof(token, "member", ours, theirs, purpose, name)):
        _refuse(connection, "its token is not this cluster's")
    send_frame(connection, {"proof": _proof(token, "leader", ours, theirs, purpose, name)})
    return purpose, name, Channel(connection, _key(token, ours, theirs), leads=True)


def introduce(connection: socket.socket, token: bytes, purpose: str, name: str, seconds: float) -> Channel:
    """Prove ourselves to the leader, and have it prove itself: the member's side.

    Raises:
        RefusedError: one of the two does not know the token.
        WireError, OSError: it does not speak as it should, or not in time.
    """
    deadline, ours = time.monotonic() + seconds, secrets.token_hex(32)
    connection.settimeout(seconds)
    said = receive_frame(connection, GREETING_BYTES, deadline)
    theirs = _text(said, "nonce")
    if said.get("hetexp") != PROTOCOL:
        raise RefusedError(f"it speaks version {said.get('hetexp')} of the protocol, this machine {PROTOCOL}")
    proof = _proof(token, "member", theirs, ours, purpose, name)
    send_frame(
        connection,
        {"hetexp": PROTOCOL, "nonce": ours, "purpose": purpose, "name": name, "proof": proof},
    )
    answer = receive_frame(connection, GREETING_BYTES, deadline)
    if "refused" in answer:
        raise RefusedError(_text(answer, "refused"))
    expected = _proof(token, "leader", theirs, ours, purpose, name)
    if not hmac.compare_digest(_text(answer, "proof"), expected):
        raise RefusedError("it does not know this cluster's token")
    return Channel(connection, _key(token, theirs, ours), leads=False)


class Channel:
    """A connection between two machines that have proved themselves.

    Args:
        connection: belongs to the channel from now on.
        key: of this connection alone.
        leads: whether this is the leader's end.
    """

    def __init__(self, connection: socket.socket, key: bytes, leads: bool) -> None:
        self.connection, self._key = connection, key
        self._out, self._in = (b"leader", b"member") if leads else (b"member", b"leader")
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def send(self, value: dict[str, Any]) -> None:
        """Send a message; any thread may.

        Raises:
            OSError: the connection is gone, or takes nothing for as long as its timeout.
        """
        body = json.dumps(value).encode()
        with self._lock:
            _send(self.connection, self._mac(self._out, self._sent, body) + body)
            self._sent += 1

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        """Return the next message; one thread only.

        Raises:
            WireError: it is not the next one of this connection, or no JSON object.
            OSError: the connection broke, or nothing came in time.
        """
        frame = _receive(self.connection, FRAME_BYTES, deadline)
        mac, body = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, body)):
            raise WireError("a message that the other side has not sent")
        self._received += 1
        return _parsed(body)

    def close(self) -> None:
        """End the connection; whoever waits in it wakes up."""
        shut(self.connection)

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "big") + body, "sha256")


def shut(connection: socket.socket) -> None:
    """End a connection, also where a thread waits in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def accepted(listener: socket.socket) -> Iterator[tuple[socket.socket, str]]:
    """Yield connections and the addresses that they come from, until the listener is shut."""
    while True:
        try:
            connection, peer = listener.accept()
        except OSError as error:
            if error.errno not in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.EINTR):
                return
            time.sleep(0.05)  # the descriptors of this process are used up for a moment
            continue
        yield connection, peer[0]


def _refuse(connection: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        send_frame(connection, {"refused": why})
    raise RefusedError(why)


def _proof(token: bytes, role: str, leader: str, member: str, purpose: str, name: str) -> str:
    """Return what only one who knows the token can say of these two random numbers."""
    message = json.dumps([PROTOCOL, role, leader, member, purpose, name]).encode()
    return hmac.new(token, message, "sha256").hexdigest()


def _key(token: bytes, leader: str, member: str) -> bytes:
    return hmac.digest(token, json.dumps([PROTOCOL, "key", leader, member]).encode(), "sha256")


def _text(message: dict[str, Any], key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not value.isascii():
        raise WireError("no greeting of hetexp")
    return value


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("no JSON") from None
    if not isinstance(value, dict):
        raise WireError("no JSON object")
    return value


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket, most_bytes: int, deadline: float | None) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if length > most_bytes:
        raise WireError(f"a message of {length} bytes, where {most_bytes} are the most")
    return _exactly(connection, length, deadline)


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    pieces, left = [], count
    while left:
        if deadline is not None:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("it did not answer in time")
            connection.settimeout(seconds)
        piece = connection.recv(min(left, 2**16))
        if not piece:
            raise ConnectionResetError("it closed the connection")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)

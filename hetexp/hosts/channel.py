"""Messages between machines: frames of JSON, after both sides have proved that they know the token.

A frame is its length (four bytes, the most significant first) and that many bytes of JSON. Nothing is
unpickled. Both sides prove themselves by HMAC-SHA256 over fresh random numbers of both sides and over their
role, so that a recorded or reflected message proves nothing. Afterwards every frame of a control connection
carries an HMAC over its direction, its number and its bytes, under a key of this connection. Others can read
such a frame, but not change, repeat or omit it. Connections for a `store`, a `probe` or `files` carry raw
bytes after the handshake.
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
from collections.abc import Callable, Iterator
from typing import Any

PROTOCOL = 1
"""Version of handshake and messages; machines with different versions refuse each other."""
GREETING_BYTES = 4 * 2**10
"""Longest frame before the other side has proved itself."""
FRAME_BYTES = 32 * 2**20
"""Longest frame after that: a plan, or a part of a log."""
TRY_SECONDS = 5.0
"""Longest attempt to connect: a firewall that silently drops packets lets it wait."""
PAUSE_SECONDS = 0.1
"""Pause between two attempts to connect."""
HEARTBEATS = 5
"""Heartbeats within `cluster.silence_seconds`."""
_LENGTH = struct.Struct(">I")
_MAC_BYTES = hashlib.sha256().digest_size
PURPOSES = ("member", "store", "probe", "files")


class WireError(Exception):
    """The other side sent what it should not; the connection is of no more use."""


class RefusedError(WireError):
    """The other side does not know the token, or says that this side does not."""


def send_frame(connection: socket.socket, value: Any) -> None:
    """Send a value that JSON can carry."""
    _send(connection, json.dumps(value).encode())


def receive_frame(
    connection: socket.socket, most_bytes: int, deadline: float | None = None
) -> dict[str, Any]:
    """Return the next frame, a JSON object.

    Args:
        deadline: when all of it must have come, by the monotonic clock; `None`: the socket's own timeout.

    Raises:
        WireError: it is longer than allowed, or no JSON object.
        OSError: the connection broke, or the time is over.
    """
    return _parsed(_receive(connection, most_bytes, deadline))


def handshake_as_leader(connection: socket.socket, token: bytes, seconds: float) -> tuple[str, str, Channel]:
    """Let the member prove itself, then prove ourselves to it.

    Returns:
        Its purpose, the name that it gives itself, and the connection as a channel.

    Raises:
        RefusedError: it does not know the token; says how it failed.
        WireError, OSError: it breaks the protocol, or is too slow.
    """
    deadline, nonce = time.monotonic() + seconds, secrets.token_hex(32)
    connection.settimeout(seconds)
    send_frame(connection, {"hetexp": PROTOCOL, "nonce": nonce})
    greeting = receive_frame(connection, GREETING_BYTES, deadline)
    theirs, purpose, name = (_text(greeting, key) for key in ("nonce", "purpose", "name"))
    if greeting.get("hetexp") != PROTOCOL:
        version = greeting.get("hetexp")
        _refuse(connection, f"this machine speaks version {PROTOCOL} of the protocol, not {version}")
    if len(theirs) != len(nonce) or purpose not in PURPOSES:
        raise WireError("no greeting of hetexp")
    proof = _proof(token, "member", nonce, theirs, purpose, name)
    if not hmac.compare_digest(_text(greeting, "proof"), proof):
        _refuse(connection, "its token is not this cluster's")
    send_frame(connection, {"proof": _proof(token, "leader", nonce, theirs, purpose, name)})
    return purpose, name, Channel(connection, _key(token, nonce, theirs), leads=True)


def handshake_as_member(
    connection: socket.socket, token: bytes, purpose: str, name: str, seconds: float
) -> Channel:
    """Prove ourselves to the leader, and let it prove itself.

    Raises:
        RefusedError: one side does not know the token.
        WireError, OSError: it breaks the protocol, or is too slow.
    """
    deadline, nonce = time.monotonic() + seconds, secrets.token_hex(32)
    connection.settimeout(seconds)
    greeting = receive_frame(connection, GREETING_BYTES, deadline)
    theirs = _text(greeting, "nonce")
    if greeting.get("hetexp") != PROTOCOL:
        version = greeting.get("hetexp")
        raise RefusedError(f"it speaks version {version} of the protocol, this machine {PROTOCOL}")
    proof = _proof(token, "member", theirs, nonce, purpose, name)
    send_frame(
        connection, {"hetexp": PROTOCOL, "nonce": nonce, "purpose": purpose, "name": name, "proof": proof}
    )
    answer = receive_frame(connection, GREETING_BYTES, deadline)
    if "refused" in answer:
        raise RefusedError(_text(answer, "refused"))
    expected = _proof(token, "leader", theirs, nonce, purpose, name)
    if not hmac.compare_digest(_text(answer, "proof"), expected):
        raise RefusedError("it does not know this cluster's token")
    return Channel(connection, _key(token, theirs, nonce), leads=False)


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
            OSError: the connection is gone, or the other end reads nothing for as long as the timeout.
        """
        body = json.dumps(value).encode()
        with self._lock:
            _send(self.connection, self._mac(self._out, self._sent, body) + body)
            self._sent += 1

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        """Return the next message; one thread only.

        Raises:
            WireError: it is not the next message of this connection, or no JSON object.
            OSError: the connection broke, or no message came in time.
        """
        frame = _receive(self.connection, FRAME_BYTES, deadline)
        mac, body = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, body)):
            raise WireError("a message that the other side has not sent")
        self._received += 1
        return _parsed(body)

    def close(self) -> None:
        """End the connection; a thread that waits in it wakes up."""
        close_socket(self.connection)

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "big") + body, "sha256")


class HeartbeatChannel:
    """A channel whose ends exchange heartbeats, so that each notices the loss of the other.

    Args:
        channel: belongs to this object from now on.
        silence_seconds: longest silence before the other end counts as lost.
        name: of the threads.
        receive: gets each message that is no heartbeat.
        lost: gets the reason, once, when no more messages can come.
    """

    def __init__(
        self,
        channel: Channel,
        silence_seconds: float,
        name: str,
        receive: Callable[[dict[str, Any]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._channel, self._silence = channel, silence_seconds
        self._receive, self._lost = receive, lost
        self._closed = threading.Event()
        channel.connection.settimeout(silence_seconds)
        self._reader, self._beater = (
            threading.Thread(target=target, name=name, daemon=True) for target in (self._read, self._beat)
        )

    def start(self) -> None:
        """Start to receive messages and to send heartbeats."""
        self._beater.start()  # first, because the reader may close both at once
        self._reader.start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        self._channel.send(message)

    def wait(self, seconds: float) -> None:
        """Return when the other end has closed the connection, or the time is over."""
        self._reader.join(seconds)

    def close(self) -> None:
        """End the connection and both threads."""
        self._closed.set()
        self._channel.close()
        for thread in (self._reader, self._beater):
            if thread is not threading.current_thread():
                thread.join(5.0)

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive(time.monotonic() + self._silence)
                if message["op"] != "beat":
                    self._receive(message)
        except TimeoutError:
            self._lost(f"gave no sign of life for {self._silence:g} s (cluster.silence_seconds)")
        except OSError as error:
            self._lost("closed its connection" + (f" ({error.strerror})" if error.strerror else ""))
        except (WireError, KeyError, TypeError, ValueError) as error:
            self._lost(f"sent what it should not ({error})")

    def _beat(self) -> None:
        while not self._closed.wait(self._silence / HEARTBEATS):
            try:
                self._channel.send({"op": "beat"})
            except OSError:  # the reading thread reports it
                return


def connect_within(
    address: tuple[str, int],
    seconds: float,
    source: str | None = None,
    waits: Callable[[OSError], None] = lambda _: None,
) -> socket.socket:
    """Return a connection as soon as the other end accepts it.

    Args:
        source: address of this machine that the connection comes from.
        waits: gets the reason of the first failure, if there is time for another attempt.

    Raises:
        OSError: the last failure, when the time is over.
    """
    deadline, first = time.monotonic() + seconds, True
    while True:
        timeout = max(min(TRY_SECONDS, deadline - time.monotonic()), 0.05)
        try:
            return socket.create_connection(address, timeout, (source, 0) if source is not None else None)
        except OSError as error:
            if time.monotonic() + PAUSE_SECONDS >= deadline:
                raise
            if first:
                waits(error)
            first = False
            time.sleep(PAUSE_SECONDS)


def explain(error: OSError) -> str:
    """Return why a connection failed, with a likely reason."""
    if isinstance(error, TimeoutError):
        return "nothing answers (a firewall that drops, or a wrong address)"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (is it started there, with the same cluster.port?)"
    return error.strerror or str(error)


def close_socket(connection: socket.socket) -> None:
    """End a connection, even while a thread waits in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Listener:
    """Accepts connections, each of which a thread of its own serves.

    Args:
        server: the listening socket; it belongs to this object from now on.
        serve: gets each connection and the address that it comes from.
        name: of the threads.
    """

    def __init__(self, server: socket.socket, serve: Callable[[socket.socket, str], None], name: str) -> None:
        self._server, self._serve, self._name = server, serve, name
        self.port: int = server.getsockname()[1]
        self.open: set[socket.socket] = set()
        """Connections that `close` ends."""
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and the open connections."""
        close_socket(self._server)
        self._thread.join()
        for connection in list(self.open):
            close_socket(connection)

    @contextlib.contextmanager
    def holding(self, connection: socket.socket) -> Iterator[None]:
        """End another connection with the port, for as long as the context lasts."""
        self.open.add(connection)
        try:
            yield
        finally:
            self.open.discard(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._server.accept()
            except OSError as error:
                if error.errno not in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.EINTR):
                    return
                time.sleep(0.05)  # this process has no free descriptors for a moment
                continue
            self.open.add(connection)
            threading.Thread(
                target=self._serve_one, args=(connection, peer[0]), name=self._name, daemon=True
            ).start()

    def _serve_one(self, connection: socket.socket, peer: str) -> None:
        try:
            self._serve(connection, peer)
        finally:
            self.open.discard(connection)


def _refuse(connection: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        send_frame(connection, {"refused": why})
    raise RefusedError(why)


def _proof(token: bytes, role: str, leader: str, member: str, purpose: str, name: str) -> str:
    """Return the proof for these two random numbers, which only the token's owners can compute."""
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

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
import hashlib
import hmac
import json
import math
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hetexp.hardware.link_probe import received

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
T = TypeVar("T")
PLAIN = (
    "Nothing that travels between the machines is encrypted, and gradients, weights and the store are not "
    "authenticated either: others in the network could read or change them. Use a VPN unless you trust it."
)
"""What a run over several machines says at its start."""


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


def handshake_as_leader(
    connection: socket.socket,
    token: bytes,
    seconds: float,
    idle_seconds: float = math.inf,
    proved: Callable[[], None] = lambda: None,
) -> tuple[str, str, Channel]:
    """Let the member prove itself, then prove ourselves to it.

    Args:
        seconds: for all of it.
        idle_seconds: until the member's greeting has come.
        proved: called when the member has proved itself, before it gets an answer.

    Returns:
        Its purpose, the name that it gives itself, and the connection as a channel.

    Raises:
        RefusedError: it does not know the token; says how it failed.
        WireError, OSError: it breaks the protocol, or is too slow.
    """
    deadline, nonce = time.monotonic() + seconds, secrets.token_hex(32)
    connection.settimeout(seconds)
    send_frame(connection, {"hetexp": PROTOCOL, "nonce": nonce})
    greeting = receive_frame(connection, GREETING_BYTES, min(deadline, time.monotonic() + idle_seconds))
    theirs, purpose, name = (_text(greeting, key) for key in ("nonce", "purpose", "name"))
    if greeting.get("hetexp") != PROTOCOL:
        version = greeting.get("hetexp")
        _refuse(connection, f"this machine speaks version {PROTOCOL} of the protocol, not {version}")
    if len(theirs) != len(nonce) or purpose not in PURPOSES:
        raise WireError("no greeting of hetexp")
    proof = _proof(token, "member", nonce, theirs, purpose, name)
    if not hmac.compare_digest(_text(greeting, "proof"), proof):
        _refuse(connection, "its token is not this cluster's")
    proved()
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
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

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

    def hidden(self, secret: str, nonce: str) -> str:
        """Return 32 bytes in hexadecimal digits such that others cannot read them; twice returns the secret.

        Args:
            nonce: a random text that no other call for this connection has.
        """
        pad = hmac.digest(self._key, b"hidden" + nonce.encode(), "sha256")
        return bytes(a ^ b for a, b in zip(bytes.fromhex(secret), pad, strict=True)).hex()

    def listen(
        self, silence_seconds: float, receive: Callable[[dict[str, Any]], None], lost: Callable[[str], None]
    ) -> None:
        """Exchange heartbeats with the other end, and receive its messages, in two threads.

        Args:
            silence_seconds: longest silence before the other end counts as lost.
            receive: gets each message that is no heartbeat.
            lost: gets the reason, once, when no more messages can come.
        """
        self.connection.settimeout(silence_seconds)
        beats = (self._beat, (silence_seconds / HEARTBEATS,))
        reads = (self._read, (silence_seconds, receive, lost))
        self._threads = [
            threading.Thread(target=target, args=arguments, name="channel", daemon=True)
            for target, arguments in (beats, reads)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> None:
        """Return when the other end has closed the connection that `listen` reads, or the time is over."""
        self._threads[-1].join(seconds)

    def close(self) -> None:
        """End the connection and the threads of `listen`."""
        self._closed.set()
        close_socket(self.connection)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    def _read(
        self, silence_seconds: float, receive: Callable[[dict[str, Any]], None], lost: Callable[[str], None]
    ) -> None:
        try:
            while True:
                message = self.receive(time.monotonic() + silence_seconds)
                if message["op"] != "beat":
                    receive(message)
        except TimeoutError:
            lost(f"gave no sign of life for {silence_seconds:g} s (cluster.silence_seconds)")
        except OSError as error:
            lost("closed its connection" + (f" ({error.strerror})" if error.strerror else ""))
        except (WireError, KeyError, TypeError, ValueError, OverflowError) as error:
            lost(f"sent what it should not ({error})")

    def _beat(self, pause_seconds: float) -> None:
        with contextlib.suppress(OSError):  # the reading thread reports it
            while not self._closed.wait(pause_seconds):
                self.send({"op": "beat"})

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "big") + body, "sha256")


def retried(
    attempt: Callable[[float], T], seconds: float, waits: Callable[[OSError], None] = lambda _: None
) -> T:
    """Return what an attempt to connect returns, the first one without an `OSError`.

    Args:
        attempt: gets the seconds that it may take.
        seconds: time for all attempts.
        waits: gets the reason of the first failure, if there is time for another attempt.

    Raises:
        OSError: the last failure, when the time is over.
    """
    deadline, first = time.monotonic() + seconds, True
    while True:
        try:
            return attempt(max(min(TRY_SECONDS, deadline - time.monotonic()), 0.05))
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


class Listener(socketserver.ThreadingTCPServer):
    """Accepts connections; a thread serves each of them, and closes it unless it is kept.

    Args:
        address: to listen on, with the port.
        serve: gets each connection and the address that it comes from; returns whether to keep it open.

    Raises:
        OSError: the port cannot be opened there.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], serve: Callable[[socket.socket, str], bool]) -> None:
        super().__init__(address, socketserver.BaseRequestHandler)
        self._serve = serve
        self.open: set[socket.socket] = set()
        """Connections that `close` ends."""
        threading.Thread(target=self.serve_forever, args=(0.05,), name="listener", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)  # this process may have no free descriptors for a moment
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        kept = False
        try:
            kept = self._serve(request, client_address[0])
        finally:
            self.open.discard(request)
            if not kept:
                close_socket(request)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        self.open.add(request)
        return True

    def close(self) -> None:
        """Close the port and the open connections."""
        self.shutdown()
        self.server_close()
        for connection in list(self.open):
            close_socket(connection)


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
    (length,) = _LENGTH.unpack(received(connection, _LENGTH.size, deadline))
    if length > most_bytes:
        raise WireError(f"a message of {length} bytes, where {most_bytes} are the most")
    return received(connection, length, deadline)

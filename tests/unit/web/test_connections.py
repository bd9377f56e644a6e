"""Connections that bring no request are let go, and keep no other client out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")
pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")
pytest.importorskip("websockets", reason="the extra `dashboard` is not installed")

from websockets.sync import client

from hetexp.hosts.newcomers import Newcomers
from hetexp.web import connections
from hetexp.web.access import MOST_BYTES, Access
from hetexp.web.connections import Connection
from hetexp.web.main import server_of

TOKEN = "correct-horse-battery"
HALF = b"GET /api/v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
WHOLE = HALF + b"no\r\nConnection: close\r\n\r\n"
Connect = Callable[..., socket.socket]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Connect to a server that lets few connections wait, from an address and with the first bytes."""
    from hetexp.web.access import Guard

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            while (message := await receive())["type"] != "websocket.disconnect":
                if message["type"] == "websocket.receive":
                    await send({"type": "websocket.send", "text": message["text"]})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(Connection, "waiting", Newcomers(6, 4, Connection.waiting._drop))
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = server_of(Guard(app, Access(token=TOKEN)))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()

        def make(first: bytes, address: str = "127.0.0.1") -> socket.socket:
            one = socket.create_connection(listener.getsockname(), 20, (address, 0))
            one.sendall(first)
            opened.append(one)
            return one

        yield make
        for one in opened:
            one.close()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def answer(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes a connection."""
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def status(connection: socket.socket) -> int:
    return int(answer(connection).split(b" ", 2)[1])


def turned_away(connection: socket.socket) -> bool:
    """Return whether a connection was closed, without an answer if the server had not read its bytes yet."""
    try:
        return status(connection) == 503
    except ConnectionResetError:
        return True


def test_half_open_connections_keep_no_client_out(connect: Connect) -> None:
    half = [connect(HALF) for _ in range(20)]
    assert status(connect(WHOLE)) == 200
    for one in half[:16]:
        assert turned_away(one)
    half[-1].sendall(b"no\r\nConnection: close\r\n\r\n")
    assert status(half[-1]) == 200  # the newest were kept


def test_an_address_loses_its_own_connections_first(connect: Connect) -> None:
    other = connect(HALF, "127.0.0.2")
    for one in [connect(b"") for _ in range(9)][:5]:
        assert status(one) == 503
    other.sendall(b"no\r\nConnection: close\r\n\r\n")
    assert status(other) == 200
    addresses = [connect(HALF, f"127.0.0.{number}") for number in range(10, 20)]
    assert turned_away(addresses[0])  # there is a limit of all addresses, too
    assert status(connect(WHOLE)) == 200


def post(length: int, token: str = TOKEN) -> bytes:
    """Return the headers of a request whose body has this length."""
    lines = ("POST /api/v1/trainings HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {token}")
    body = ("Content-Type: application/json", f"Content-Length: {length}", "", "")
    return "\r\n".join((*lines, *body)).encode()


@pytest.mark.parametrize(
    ("first", "expected"),
    [(b"", b"408"), (b"G", b"408"), (HALF, b"408"), (post(100), b"408"), (post(100) + b"{", b"408")]
    + [(post(100, "wrong"), b"401"), (WHOLE.replace(b"close", b"keep-alive") + HALF, b"200")],
)
def test_a_request_that_does_not_come_is_not_waited_for(
    first: bytes, expected: bytes, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly its bytes come, and whether or not an answer was sent before."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    one = connect(first)
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            try:
                one.sendall(b"x")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        said = one.recv(2**16)
        while said and one.recv(2**16):
            pass
    except ConnectionResetError:  # a byte came when the connection was closed
        pass
    finally:
        over.set()
        thread.join()
    assert said.split(b" ")[1] == expected


def test_who_sends_requests_stays(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    one, over = connect(b""), threading.Event()
    for _ in range(8):
        one.sendall(WHOLE.replace(b"close", b"keep-alive"))
        assert one.recv(2**16).startswith(b"HTTP/1.1 200 ")
        over.wait(0.1)
    one.sendall(post(MOST_BYTES) + b" " * MOST_BYTES)
    assert one.recv(2**16).startswith(b"HTTP/1.1 200 ")


def test_websockets_stay(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are requests that have come, however many and however long."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    over = threading.Event()
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(client.connect("ws://127.0.0.1/live", sock=connect(b""))) for _ in range(8)
        ]
        for number in range(10):
            for one in sockets:
                one.send(f"{number}")
                assert one.recv(timeout=20) == f"{number}"
            over.wait(0.1)

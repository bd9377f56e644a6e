from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hetexp.engine.probe import ProbeServer, measured, slowest


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    one = ProbeServer("127.0.0.1")
    yield one
    one.close()


def test_loopback_is_fast(server: ProbeServer) -> None:
    link = measured("127.0.0.1", server.port, server.token)
    assert link.gb_per_second > 0.01
    assert 0 < link.latency_seconds < 1
    assert link.source.startswith("measured")


def test_strangers_get_nothing(server: ProbeServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"x" * 16)
        assert client.recv(1) == b""


def test_one_host_has_no_network(server: ProbeServer) -> None:
    here = {"node": "0", "address": "127.0.0.1", "probe": None}
    assert slowest([here, here]) is None
    there = {"node": "1", "address": "127.0.0.1", "probe": [server.port, server.token]}
    assert slowest([here, here, there, here | {"node": "1"}]) is not None

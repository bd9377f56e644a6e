"""gloo's connections end when they are shut, whoever waits on them."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from hetexp.comm.connections.sockets import remembered, shut_all
from hetexp.comm.library_exchange import LibraryExchange
from hetexp.core.errors import PeerLostError


def test_a_rank_that_waits_in_a_collective_is_told() -> None:
    """Its peer lives and never comes; the limit of the collective is a minute."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda rank: LibraryExchange("gloo", store, rank, 2, 60.0), range(2))
        waiting = pool.submit(one.sum_, torch.ones(4))
        assert shut_all() >= 1  # the other end may have closed itself by then
        with pytest.raises(PeerLostError):
            waiting.result(timeout=20.0)
        with pytest.raises(PeerLostError):
            pool.submit(other.sum_, torch.ones(4)).result(timeout=20.0)
    one.close()
    other.close()


def test_other_connections_stay_open() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        shut_all()
        client.sendall(b"here")
        assert accepted.recv(4) == b"here"


def test_may_be_called_from_several_threads_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with remembered():
            client = socket.create_connection(server.getsockname())
        threads = [threading.Thread(target=shut_all) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.recv(1) == b""
        client.close()

"""A store that tells those who wait that nobody comes any more, also to torch's own code."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hetexp.comm.connections.pulse import Pulse
from hetexp.comm.connections.watched_store import WatchedStore, another_connection
from hetexp.comm.library_exchange import LibraryExchange
from hetexp.comm.rendezvous import all_gather_json
from hetexp.core.errors import PeerLostError


def test_keys_are_under_the_prefix() -> None:
    store = dist.HashStore()
    watched = WatchedStore(store, "epoch/3/", lambda: False)
    watched.set("a", "1")
    assert store.get("epoch/3/a") == watched.get("a") == b"1"
    assert watched.check(["a"])
    assert not watched.check(["b"])
    assert watched.add("n", 2) == 2
    watched.multi_set(["c", "d"], ["3", "4"])
    assert watched.multi_get(["c", "d"]) == [b"3", b"4"]
    assert watched.delete_key("a")
    assert not store.check(["epoch/3/a"])
    assert another_connection(watched) is watched


def test_a_wait_ends_in_time_or_when_nobody_comes() -> None:
    gone = threading.Event()
    watched = WatchedStore(dist.HashStore(), "", gone.is_set)
    with pytest.raises(RuntimeError, match="did not come within 0.05 s"):
        watched.wait(["never"], timedelta(seconds=0.05))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(watched.get, "never")
        gone.set()
        with pytest.raises(PeerLostError, match="members of this training have changed"):
            waiting.result(timeout=20.0)


def test_a_meeting_ends_when_nobody_comes() -> None:
    gone = threading.Event()
    watched = WatchedStore(dist.HashStore(), "", gone.is_set)
    with ThreadPoolExecutor(2) as pool:
        meeting = pool.submit(Pulse(watched, 0, 2, 60.0).meet)
        telling = pool.submit(all_gather_json, watched, "facts", 0, 2, {}, 60.0)
        gone.set()
        for waiting in (meeting, telling):
            with pytest.raises((PeerLostError, RuntimeError), match="have changed"):
                waiting.result(timeout=20.0)


def test_gloo_forms_its_group_through_it() -> None:
    """torch calls it from C++, under a prefix of its own; a member that never comes keeps nobody for long."""
    store, gone = dist.HashStore(), threading.Event()
    watched = [WatchedStore(store, "e/", gone.is_set) for _ in range(2)]

    def form(rank: int) -> torch.Tensor:
        one = LibraryExchange("gloo", dist.PrefixStore("x", watched[rank]), rank, 2, 60.0)
        tensor = torch.ones(3)
        one.sum_(tensor)
        one.close()
        return tensor

    with ThreadPoolExecutor(2) as pool:
        assert [tensor.tolist() for tensor in pool.map(form, range(2))] == [[2.0] * 3] * 2
        alone = pool.submit(LibraryExchange, "gloo", dist.PrefixStore("y", watched[0]), 0, 2, 60.0)
        gone.set()
        with pytest.raises(Exception, match="have changed"):
            alone.result(timeout=20.0)

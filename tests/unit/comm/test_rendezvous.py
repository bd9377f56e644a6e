"""How ranks meet: everybody gets everything in order, and who is missing or different is named."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from hetexp.comm.rendezvous import all_gather_json, compare_facts, connect_store, form_group, forming_timeout
from hetexp.core.errors import HandshakeError, SetupError

T = TypeVar("T")


def together(world_size: int, rank: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size)))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Return a port that nobody listens on, kept from others while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening
        yield taken.getsockname()[1]


# ---------------------------------------------------------------- exchange


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everybody_gets_everything_in_order(world_size: int) -> None:
    store = dist.HashStore()
    mine = [{"rank": r, "nested": {"list": [r, None, 0.5, "ü"]}, "big": 2**60 + r} for r in range(world_size)]
    gathered = together(world_size, lambda r: all_gather_json(store, "facts", r, world_size, mine[r], 20.0))
    assert gathered == [mine] * world_size


def test_topics_are_kept_apart() -> None:
    store = dist.HashStore()

    def rank(r: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        first = all_gather_json(store, "first", r, 2, {"value": r}, 20.0)
        return first, all_gather_json(store, "second", r, 2, {"value": 10 + r}, 20.0)

    assert together(2, rank) == [([{"value": 0}, {"value": 1}], [{"value": 10}, {"value": 11}])] * 2


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named(missing: int) -> None:
    other = 1 - missing
    with pytest.raises(HandshakeError) as refused:
        all_gather_json(dist.HashStore(), "handshake", other, 2, {}, 0.05)
    told = str(refused.value)
    assert told.startswith(f"rank {other} waited 0.05 s at ")
    assert f"for rank {missing}, which did not come" in told
    assert "handshake" in told


def test_the_address_is_named_where_the_store_has_one() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(HandshakeError, match=rf"at 127\.0\.0\.1:{server.port} for rank 1"):
        all_gather_json(server, "handshake", 0, 2, {}, 0.05)


def test_the_limit_is_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    now = [100.0]

    class Slow(dist.HashStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
            waits.append(timeout.total_seconds())
            now[0] += 2.0

        def get(self, key: str) -> bytes:
            return b"{}"

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    all_gather_json(Slow(), "t", 0, 3, {}, 5.0)
    assert waits == [5.0, 3.0, 1.0]


def test_values_travel_as_json_never_as_pickle() -> None:
    store = dist.HashStore()
    with pytest.raises(TypeError):
        all_gather_json(store, "t", 0, 1, {"value": object()}, 1.0)
    store.set("t/0", "\x80\x04N.")
    with pytest.raises(ValueError, match="."):
        all_gather_json(_ReadOnly(store), "t", 0, 1, {}, 1.0)


class _ReadOnly(dist.HashStore):
    """Answers with what somebody else wrote."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        return None

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        return None

    def get(self, key: str) -> bytes:
        return self._store.get(key)


# ---------------------------------------------------------------- compare_facts

NAMES = ["rank 0 (cpu:0)", "rank 1 (cuda:0)", "rank 2 (cpu:1)"]


def test_equal_facts_pass() -> None:
    fact = {"a": 1, "b": {"c": [1, 2], "d": None}}
    compare_facts([fact, {"b": {"d": None, "c": [1, 2]}, "a": 1}], NAMES[:2])
    compare_facts([fact], NAMES[:1])


def test_each_fact_that_differs_is_named_with_every_value() -> None:
    facts: list[dict[str, Any]] = [
        {
            "same": 1,
            "config": "aa",
            "data": {"samples": 10, "order": "x"},
            "model": {"shape": {"w": "[2, 3]"}},
        },
        {
            "same": 1,
            "config": "bb",
            "data": {"samples": 10, "order": "x"},
            "model": {"shape": {"w": "[2, 4]"}},
        },
        {"same": 1, "config": "aa", "data": {"samples": 11, "order": "x"}, "model": {"shape": {}}},
    ]
    with pytest.raises(HandshakeError) as refused:
        compare_facts(facts, NAMES)
    told = str(refused.value)
    for part in (
        "config is aa on rank 0 (cpu:0), bb on rank 1 (cuda:0), aa on rank 2 (cpu:1)",
        "data.samples is 10 on rank 0 (cpu:0), 10 on rank 1 (cuda:0), 11 on rank 2 (cpu:1)",
        "model.shape.w is [2, 3] on rank 0 (cpu:0), [2, 4] on rank 1 (cuda:0), absent on rank 2 (cpu:1)",
    ):
        assert part in told
    assert "same" not in told
    assert "order" not in told


def test_a_fact_that_only_a_later_rank_has() -> None:
    with pytest.raises(HandshakeError, match="extra is absent on rank 0 .*, 3 on rank 1"):
        compare_facts([{}, {"extra": 3}], NAMES[:2])


def test_a_mapping_against_a_plain_value() -> None:
    with pytest.raises(HandshakeError) as refused:
        compare_facts([{"a": {"b": 1}}, {"a": 1}], NAMES[:2])
    assert "a.b is 1 on rank 0" in str(refused.value)
    assert "a is absent on rank 0" in str(refused.value)


def test_a_fact_that_is_null_is_not_one_that_is_absent() -> None:
    with pytest.raises(HandshakeError, match="a is None on rank 0 .*, absent on rank 1"):
        compare_facts([{"a": None}, {}], NAMES[:2])


def test_many_differences_are_counted() -> None:
    facts = [{str(i): r for i in range(12)} for r in range(2)]
    with pytest.raises(HandshakeError, match="; and 4 more"):
        compare_facts(facts, NAMES[:2])


# ---------------------------------------------------------------- connecting


def test_a_closed_port_is_told_with_address_and_limit(closed_port: int) -> None:
    with pytest.raises(SetupError) as refused:
        connect_store("127.0.0.1", closed_port, 0.2)
    assert f"127.0.0.1:{closed_port} within 0.2 s" in str(refused.value)


def test_an_unknown_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(SetupError, match=r"no\.such\.host:29500 within 0\.1 s .*Name or service not known"):
        connect_store("no.such.host", 29500, 0.1)


def test_the_limit_counts_from_the_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [0.0], []

    def never(_: Any, timeout: float) -> None:
        limits.append(timeout)
        now[0] += 4.0 if len(limits) == 1 else timeout  # refused after a while, then silence
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(SetupError):
        connect_store("10.0.0.9", 1, 5.0)
    assert now[0] <= 6.0, f"gave up {now[0]} s after the first try, told to wait 5 s (tries: {limits})"


def test_a_store_that_comes_late_is_found(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("greeting", "hello")
    create, tries = socket.create_connection, []

    def refused_twice(address: tuple[str, int], timeout: float) -> socket.socket:
        tries.append(address)
        if len(tries) < 3:
            raise ConnectionRefusedError(111, "Connection refused")
        return create(address, timeout)

    monkeypatch.setattr(socket, "create_connection", refused_twice)
    store = connect_store("127.0.0.1", server.port, 20.0)
    assert store.get("greeting") == b"hello"
    assert len(tries) == 3


# ---------------------------------------------------------------- the group


def test_a_group_that_forms() -> None:
    communicator = form_group(dist.HashStore(), 0, 1, "gloo", torch.device("cpu"), 20.0)
    try:
        assert (communicator.rank, communicator.world_size) == (0, 1)
        assert float(communicator.all_reduce(torch.tensor(3.0))) == 3.0
    finally:
        communicator.close()


def test_a_group_waits_longer_for_a_collective_than_for_a_connection() -> None:
    communicator = form_group(dist.HashStore(), 0, 1, "gloo", torch.device("cpu"), 60.0, 5.0)
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 60.0
    finally:
        communicator.close()


def test_a_group_forms_under_the_same_name_after_one_that_did_not() -> None:
    """Where it did not form on some ranks only, they meet again all the same."""
    names: list[str] = []

    class Store(dist.Store):
        """Writes down what this rank calls itself."""

        def set(self, key: str, value: str) -> None:
            names.append(key)
            raise RuntimeError("Connection reset by peer")

    for _ in range(2):
        with pytest.raises(SetupError, match="did not form"):
            form_group(Store(), 0, 2, "gloo", torch.device("cpu"), 60.0)
    assert len(names) == 2 and names[0] == names[1]


def test_gloo_has_a_part_of_the_limit() -> None:
    """It waits several times its timeout for a connection, and is given no longer than for a collective."""
    assert forming_timeout(60.0, 5.0).total_seconds() == 1.0
    assert forming_timeout(60.0, None).total_seconds() == 60.0
    assert forming_timeout(0.5, 5.0).total_seconds() == 0.5


@pytest.mark.parametrize("limits", [(0.2, None), (60.0, 0.2)])
def test_a_group_that_does_not_form(limits: tuple[float, float | None]) -> None:
    try:
        with pytest.raises(SetupError, match="the gloo group of 2 ranks did not form"):
            form_group(dist.HashStore(), 0, 2, "gloo", torch.device("cpu"), *limits)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

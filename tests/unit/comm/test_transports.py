"""The self-test at the start: what carries is taken, what does not is given up by all ranks together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetexp.comm import transports as module
from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.exchange import Exchange
from hetexp.comm.library_exchange import LibraryExchange
from hetexp.comm.transports import Job, Transports, form_transports, self_test
from hetexp.core.errors import PeerLostError, SetupError
from hetexp.core.topology import Group, Topology

CPU = torch.device("cpu")
SHM, GLOO = Topology.flat("shm", 3), Topology.flat("gloo", 3)
LEVELS = Topology(((Group("nccl", (0, 1)),), (Group("shm", (0, 2)),)))
released = threading.Event()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small messages; the default process group, of which a process has one, stands aside."""
    monkeypatch.setattr(module, "SIZES", (5, 1003))
    monkeypatch.setattr(module, "form_group", lambda *_: SoloCommunicator())
    released.clear()
    yield
    released.set()
    for thread in threading.enumerate():
        if thread.name == "self-test":
            thread.join()


class Broken(LibraryExchange):
    """Carries nothing, as its kind says."""

    kind = "zeros"
    limit = 30.0

    def __init__(self, library: str, store: dist.Store, rank: int, size: int) -> None:
        super().__init__("gloo", store, rank, size, self.limit)
        self.name = library

    def sum_(self, tensor: torch.Tensor) -> None:
        if self.kind == "raises" and self.rank == 1:
            raise RuntimeError("peer access is not supported\nin some file")
        if self.kind == "hangs":
            released.wait()
        super().sum_(tensor)
        if self.kind == "zeros" and self.rank == 1:
            tensor[len(tensor) // 2 :] = 0
        if self.kind == "old":
            tensor[0] = 3

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        everyone = super().gather(tensor)
        return everyone[::-1] if self.kind == "mixed up" else everyone


def broken(kind: str, *libraries: str) -> Any:
    """Return a builder whose exchanges of these libraries are broken."""
    made: type[Broken] = type("Made", (Broken,), {"kind": kind})
    whole: type[Broken] = type("Whole", (Broken,), {"kind": ""})

    def build(group: Group, store: dist.Store, rank: int) -> Exchange:
        chosen = made if group.library in libraries else whole
        return chosen(group.library, store, rank, len(group.ranks))

    return build


def job(rank: int, store: dist.Store, limit: float = 20.0) -> Job:
    return Job(store, rank, 3, CPU, 30.0, limit)


def form(routes: Sequence[Topology], build: Any, limit: float = 20.0) -> list[Transports]:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: form_transports(routes, job(rank, store, limit), build), range(3)))


def total(paths: Transports, rank: int) -> float:
    tensor = torch.full((7,), float(rank + 1))
    paths.exchange.sum_(tensor)
    return float(tensor[0])


def test_the_first_route_is_taken_where_it_carries() -> None:
    found = form([LEVELS, SHM, GLOO], broken("", "none"))
    assert [(one.route, one.fallback) for one in found] == [(LEVELS, None)] * 3
    assert [one.exchange.name for one in found] == ["nccl + shm"] * 3
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(total, found, range(3))) == [6.0] * 3


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("zeros", "3 of 5 numbers of a sum came back zeros (number 2 is 0 instead of 18) on rank 1"),
        ("old", "1 of 5 numbers of a sum came back wrong (number 0 is 3 instead of 6) on rank 0, 1, 2"),
        (
            "mixed up",
            "numbers of a message of rank 0 came back wrong (number 0 is 14 instead of 0) on rank 0",
        ),
        ("raises", "peer access is not supported on rank 1"),
        ("hangs", "no answer within 0.2 s (comm.self_test_seconds) on rank"),
    ],
)
def test_a_route_that_does_not_carry(kind: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = form([SHM, GLOO], broken(kind, "shm"), 0.2 if kind == "hangs" else 20.0)
    assert [one.route for one in found] == [GLOO] * 3
    fallback = found[0].fallback
    assert fallback is not None
    assert all(one.fallback == fallback for one in found)
    assert (fallback["from"], fallback["to"]) == ("shm", "gloo")
    assert told in fallback["reason"]
    (line,) = [record.getMessage() for record in caplog.records]  # of rank 0 alone
    assert line.startswith("The exchange by shm failed its self-test (")
    assert "gloo is used instead. Try: `df -h /dev/shm`" in line
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(total, found, range(3))) == [6.0] * 3


def test_several_routes_fail() -> None:
    found = form([LEVELS, SHM, GLOO], broken("zeros", "nccl", "shm"))
    fallback = found[2].fallback
    assert fallback is not None
    assert (fallback["from"], fallback["to"]) == ("nccl + shm", "gloo")
    assert fallback["reason"].startswith("nccl + shm: ")
    assert "; shm: " in fallback["reason"]


def test_what_was_asked_for_by_name_is_an_error() -> None:
    with pytest.raises(SetupError) as refused:
        form([SHM], broken("zeros", "shm"))
    told = str(refused.value)
    assert told.startswith("shm failed the self-test: ")
    assert "came back zeros" in told
    assert "Try: `df -h /dev/shm`" in told


def test_a_rank_that_is_gone_is_no_reason_for_another_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPORT_SECONDS", 0.1)
    monkeypatch.setattr(Broken, "limit", 0.5)
    store = dist.HashStore()
    left: Callable[..., Exchange] = broken("", "none")

    def rank(number: int) -> None:
        if number == 2:  # it came, and was never heard of again
            store.set("paths/2", "{}")
            return
        with pytest.raises(PeerLostError, match="another rank is gone since the self-test of shm"):
            form_transports([SHM, GLOO], job(number, store, 0.3), left)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rank, range(3)))


def test_what_was_formed_is_ended_where_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others form another group at once: torch has one default group at a time."""

    def form_alone(*_: Any) -> SoloCommunicator:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return SoloCommunicator()

    def is_gone(attempt: Any, job: Job) -> str | None:
        assert dist.is_initialized()
        raise PeerLostError("another rank is gone")

    monkeypatch.setattr(module, "form_group", form_alone)
    monkeypatch.setattr(module, "_agreed", is_gone)
    for _ in range(2):
        with pytest.raises(PeerLostError):
            form_transports([SHM], Job(dist.HashStore(), 0, 1, CPU, 30.0, 30.0))
        assert not dist.is_initialized()


def test_a_native_group_that_fails_gives_way_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, so that the one default group of this process can be the rank's."""
    asked: list[str] = []

    def formed(store: dist.Store, rank: int, size: int, library: str, *_: Any, **__: Any) -> Communicator:
        asked.append(library)
        dist.init_process_group("gloo", store=dist.PrefixStore(library, store), rank=0, world_size=1)
        return SoloCommunicator()

    def wrong(*_: Any) -> str | None:
        return None if asked[-1] == "gloo" else "zeros"

    monkeypatch.setattr(module, "form_group", formed)
    monkeypatch.setattr(module, "self_test", wrong)
    native, gloo = (Topology(((Group(library, (0,)),),)) for library in ("nccl", "gloo"))
    try:
        found = form_transports([native, gloo], replace(job(0, dist.HashStore()), world_size=1))
        assert asked == ["nccl", "gloo"]
        assert found.fallback == {"from": "nccl", "to": "gloo", "reason": "zeros on rank 0"}
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_values_differ_on_every_rank() -> None:
    """A path that gives back what a rank gave itself is found out, on any number of ranks."""

    class Echo(Exchange):
        name, rank, size = "echo", 1, 2

        def sum_(self, tensor: torch.Tensor) -> None:
            tensor *= 2

        def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            return [tensor, tensor]

    problem = self_test(Echo(), CPU)
    assert problem is not None
    assert problem.startswith("5 of 5 numbers of a sum came back wrong (number 0 is 4 instead of 3)")

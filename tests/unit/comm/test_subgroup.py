"""What sums over some of the ranks: memory on one host, gloo elsewhere and where memory cannot be had."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import FakeExchange
from support import plan_on

from hetexp.comm.exchange import Exchange
from hetexp.comm.shared_memory.exchange import SharedMemoryExchange
from hetexp.comm.subgroup import form_subgroup
from hetexp.core.errors import SetupError
from hetexp.core.plan import Plan
from hetexp.hardware.backends.cpu import CpuBackend

CPU = torch.device("cpu")
RANKS = (0, 2)


def planned(backend: str, hosts: str = "aaa") -> Plan:
    devices = [replace(CpuBackend.describe(i), host=host) for i, host in enumerate(hosts)]
    return plan_on(devices, {"trainer": {"global_batch_size": 6}, "comm": {"backend": backend}})


def formed(plan: Plan) -> list[Exchange]:
    """Form the exchange of two of three ranks; the third one does not come."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: form_subgroup(RANKS, rank, store, plan, CPU, 30.0), RANKS))


def summed(exchanges: list[Exchange]) -> list[torch.Tensor]:
    def one(exchange: Exchange) -> torch.Tensor:
        tensor = torch.full((5,), exchange.rank + 1.0)
        exchange.sum_(tensor)
        return tensor

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, exchanges))


class Memory(FakeExchange):
    """Stands for shared memory, which needs processes of its own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, device: torch.device) -> None:
        self.name, self.rank, self.size = "shm", rank, size
        assert (timeout, device) == (30.0, CPU)


@pytest.mark.parametrize("backend", ["auto", "shm"])
def test_ranks_of_one_host_share_memory(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(SharedMemoryExchange, "form", Memory)
    exchanges = formed(planned(backend, "aba"))
    assert [(one.name, one.rank, one.size) for one in exchanges] == [("shm", 0, 2), ("shm", 1, 2)]


@pytest.mark.parametrize(("backend", "hosts"), [("gloo", "aaa"), ("auto", "aab")])
def test_gloo_where_it_is_asked_for_and_between_hosts(
    monkeypatch: pytest.MonkeyPatch, backend: str, hosts: str
) -> None:
    monkeypatch.setattr(SharedMemoryExchange, "form", None)
    exchanges = formed(planned(backend, hosts))
    assert [(one.name, one.rank, one.size) for one in exchanges] == [("gloo", 0, 2), ("gloo", 1, 2)]
    assert all(tensor.tolist() == [3.0] * 5 for tensor in summed(exchanges))
    for one in exchanges:
        one.close()


def test_gloo_where_memory_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise SetupError("/dev/shm is full")

    monkeypatch.setattr(SharedMemoryExchange, "form", full)
    with caplog.at_level(logging.WARNING):
        exchanges = formed(planned("auto"))
    assert all(tensor.tolist() == [3.0] * 5 for tensor in summed(exchanges))
    assert "gloo sums over ranks 0, 2: /dev/shm is full" in caplog.text
    for one in exchanges:
        one.close()

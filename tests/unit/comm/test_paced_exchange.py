"""Buckets at the pace of links that are not there: the numbers, the moments, and what fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hetexp.comm.connections.lost import is_peer_lost
from hetexp.comm.exchange import Exchange
from hetexp.comm.paced_exchange import PacedExchange
from hetexp.core.cost.step import Channel, Links, Wire
from hetexp.core.errors import PeerLostError

PAIR = Links((Channel(1e-3, 1e6),) * 2, (Channel(2e-3, 1e6, shared=True),))
CODED = Links(PAIR.device, PAIR.exchange, wire=0.5)


class Twin(Exchange):
    """An exchange with a rank that always gives the same."""

    name, rank, size = "twin", 0, 2

    def __init__(self) -> None:
        self.calls = 0

    def sum_(self, tensor: torch.Tensor) -> None:
        self.calls += 1
        tensor.mul_(2)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.calls += 1
        return [tensor, tensor.clone()]


class Gone(Twin):
    """One whose other rank is gone."""

    def sum_(self, tensor: torch.Tensor) -> None:
        self.calls += 1
        raise PeerLostError("rank 1 of the exchange is gone")


Make = Callable[..., tuple[PacedExchange, nn.Module]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that gives a model under DDP whose buckets are paced; this is the only real rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made: list[PacedExchange] = []

    def paced(
        exchange: Exchange, wire: Wire = "float32", links: Links = PAIR, **options: Any
    ) -> tuple[PacedExchange, nn.Module]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 20)), **options)
        made.append(PacedExchange(exchange, links, 0, lambda: None, lambda: 1.0, 30.0, wire))
        model.register_comm_hook(None, made[-1].hook)
        return made[-1], model

    yield paced
    for one in made:
        one.close()
    dist.destroy_process_group()


def gradient(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(inputs).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def by_itself(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return gradient(model.module, inputs)  # type: ignore[arg-type]


def test_a_bucket_comes_back_when_the_links_would_have_brought_it(make: Make) -> None:
    paced, model = make(Twin())
    inputs = torch.randn(3, 40)
    expected = by_itself(model, inputs)
    assert torch.equal(gradient(model, inputs), expected)  # the mean of two equal ones
    assert paced.real_ratio() > 0
    paced.start(2.0)
    paced.begin_step()
    start = time.perf_counter()
    assert torch.equal(gradient(model, inputs), expected)
    num_bytes = 4 * (40 * 40 + 40 + 40 * 20 + 20)
    modelled = 2.0 * (2 * (1e-3 + num_bytes / 1e6) + 2e-3 + num_bytes / 1e6)
    assert time.perf_counter() - start >= modelled
    assert paced.buckets == [(1.0, num_bytes)]
    ((real, due),) = paced.link_seconds
    assert due == pytest.approx(modelled, rel=1e-6) and real >= due
    assert paced.sent_bytes == num_bytes


def test_buckets_pass_the_exchange_one_after_another(make: Make) -> None:
    links = Links((Channel(),) * 2, (Channel(0.05, shared=True),))
    paced, model = make(Twin(), links=links, bucket_cap_mb=0.001)
    inputs = torch.randn(3, 40)
    for _ in range(2):  # DDP puts other buckets together after the first step
        gradient(model, inputs)
    paced.start(1.0)
    paced.begin_step()
    start = time.perf_counter()
    gradient(model, inputs)
    assert len(paced.buckets) > 1
    assert time.perf_counter() - start >= 0.05 * len(paced.buckets)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_what_a_wire_loses_comes_in_a_later_step(make: Make, wire: Wire) -> None:
    paced, model = make(Twin(), wire, CODED)
    inputs = torch.randn(3, 40)
    expected = by_itself(model, inputs)
    gradient(model, inputs)  # DDP puts other buckets together after it
    firsts = []
    for _ in range(2):  # what was lost in a rehearsal nobody gets
        paced.start(1e-3)
        firsts.append(gradient(model, inputs))
    first = firsts[0]
    assert torch.equal(first, firsts[1]) and not torch.equal(first, expected)
    rounds = 40
    total = first + sum((gradient(model, inputs) for _ in range(rounds - 1)), torch.zeros_like(first))
    largest = float(expected.abs().max())
    once = float((first - expected).abs().max())
    assert 1e-4 * largest < once < 0.05 * largest
    assert float((total / rounds - expected).abs().max()) < 0.1 * once
    num_bytes = 2460 * 2 if wire == "bfloat16" else 10 * 260
    assert paced.sent_bytes == num_bytes * rounds


def test_codes_are_modelled_as_bytes_that_leave_the_device(make: Make) -> None:
    paced, model = make(Twin(), "bfloat16", CODED)
    paced.start(1.0)
    gradient(model, torch.randn(3, 40))
    ((_, due),) = paced.link_seconds
    coded = 2 * 2460 / 1e6  # out, gathered by two, and the other one's back
    assert due == pytest.approx(3 * coded + 2 * 1e-3 + 2e-3, rel=1e-6)
    assert paced.buckets == [(1.0, 4 * 2460)]


def test_a_lost_peer_ends_backward_and_every_later_bucket(make: Make) -> None:
    exchange = Gone()
    _, model = make(exchange, bucket_cap_mb=0.001)  # several buckets
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            gradient(model, torch.randn(3, 40))
        assert is_peer_lost(caught.value)
    assert exchange.calls == 1

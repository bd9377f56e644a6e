"""Sums of large tensors: the same bits on every rank, coded or not."""

from __future__ import annotations

import math

import pytest
import torch
from fake_ranks import FakeExchange, FakeGroup

from hetexp.comm import exchange as module
from hetexp.comm.compression import BLOCK, compressor_of
from hetexp.comm.exchange import Exchange
from hetexp.core.cost.step import Wire

SHAPE = (20, 50)


def own(rank: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def total() -> torch.Tensor:
    return torch.stack([own(rank) for rank in range(3)]).sum(dim=0)


def coded(exchange: Exchange, wire: Wire, tensor: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
    codec = compressor_of(wire)
    assert codec is not None
    exchange.sum_coded_(tensor, codec, feedback)
    return tensor


@pytest.mark.parametrize(("wire", "allowed"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_a_coded_sum(monkeypatch: pytest.MonkeyPatch, wire: Wire, allowed: float) -> None:
    monkeypatch.setattr(module, "CHUNK", BLOCK)  # several messages, the last one short

    def one(exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        feedback = torch.zeros(SHAPE)
        return coded(exchange, wire, own(exchange.rank), feedback), feedback

    ranks = FakeGroup(3).run(lambda comm: one(FakeExchange(comm)))
    sums, feedbacks = zip(*ranks, strict=True)
    assert all(torch.equal(each, sums[0]) for each in sums)
    assert 0 < float((sums[0] - total()).abs().max()) < allowed
    # What is missing of the sum is what the ranks have kept.
    assert torch.allclose(sums[0] + sum(feedbacks), total(), atol=1e-5)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_what_is_lost_comes_later(wire: Wire) -> None:
    """The sum of many sums is as near as one of them: errors do not add up."""

    def rounds(exchange: Exchange) -> torch.Tensor:
        feedback, summed = torch.zeros(SHAPE), torch.zeros(SHAPE)
        for _ in range(50):
            summed += coded(exchange, wire, own(exchange.rank), feedback)
        return summed

    sums = FakeGroup(3).run(lambda comm: rounds(FakeExchange(comm)))
    assert float((sums[0] - 50 * total()).abs().max()) < 0.1


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_spoils_no_later_one(wire: Wire, bad: float) -> None:
    def steps(exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        feedback = torch.zeros(SHAPE)
        tensor = own(exchange.rank)
        if exchange.rank == 1:
            tensor[3, 4] = bad
        first = coded(exchange, wire, tensor, feedback)
        return first, coded(exchange, wire, own(exchange.rank), feedback)

    for first, second in FakeGroup(3).run(lambda comm: steps(FakeExchange(comm))):
        assert not first[3, 4].isfinite()
        assert float((second - total()).abs().max()) < 0.1

"""Every rank gets the same sum, whatever travels; what a code loses is sent later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_ranks import FakeExchange, FakeGroup

from hetexp.comm import compression, exchange
from hetexp.comm.communicator import Communicator
from hetexp.comm.compression import BLOCK
from hetexp.comm.summation import Summation
from hetexp.core.cost.step import Channel, Links, Wire

LENGTH = 1000


def own(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([own(rank, dtype) for rank in range(3)]).sum(dim=0)


def each(
    wire: Wire, function: Callable[[Summation, int], torch.Tensor], ranks: int = 3
) -> list[torch.Tensor]:
    return FakeGroup(ranks).run(lambda comm: function(Summation(FakeExchange(comm), wire), comm.rank))


@pytest.mark.parametrize(("wire", "allowed"), [("float32", 1e-6), ("bfloat16", 0.02), ("int8", 0.05)])
def test_all_ranks_get_one_sum(monkeypatch: pytest.MonkeyPatch, wire: Wire, allowed: float) -> None:
    for module in (compression, exchange):  # several messages, the last one short
        monkeypatch.setattr(module, "CHUNK", BLOCK)
    sums = each(wire, lambda summation, rank: summation.sum_(own(rank)))
    assert all(torch.equal(one, sums[0]) for one in sums)
    true = total()
    assert float((sums[0] - true).abs().max()) < allowed
    if wire != "float32":
        assert not torch.equal(sums[0], true)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_what_is_lost_comes_later(wire: Wire) -> None:
    """The sum of many sums is as near as one of them: errors do not add up."""

    def rounds(summation: Summation, rank: int) -> torch.Tensor:
        return sum((summation.sum_(own(rank)) for _ in range(50)), torch.zeros(LENGTH))

    sums = each(wire, rounds)
    true = 50 * total()
    assert float((sums[0] - true).abs().max()) < 0.1


@pytest.mark.parametrize(("wire", "sent"), [("float32", 4000), ("bfloat16", 2000), ("int8", 4 * 260)])
def test_bytes_are_counted(wire: Wire, sent: int) -> None:
    def count(summation: Summation, rank: int) -> torch.Tensor:
        summation.sum_(own(rank))
        summation.sum_(own(rank))
        return torch.tensor(summation.sent_bytes)

    assert [int(one) for one in each(wire, count)] == [2 * sent] * 3


def test_numbers_travel_in_their_own_type() -> None:
    sums = each("float32", lambda summation, rank: summation.sum_(own(rank, torch.float64)))
    assert sums[0].dtype == torch.float64
    true = total(torch.float64)
    assert float((sums[0] - true).abs().max()) < 1e-15


def test_a_rank_alone_sends_nothing() -> None:
    summation = Summation(None, "int8")
    assert torch.equal(summation.sum_(own(0)), own(0))
    assert summation.sent_bytes == 0


def test_modelled_time_of_both_ways() -> None:
    links = Links(device=(Channel(),) * 4, exchange=(Channel(0.5, 100.0),))

    def seconds(comm: Communicator) -> tuple[float, float]:
        real = FakeExchange(comm)
        return Summation(real).seconds(links, 200, 4), Summation(real, "bfloat16").seconds(links, 400, 4)

    # A ring of four: 6 rounds of a quarter each, or 3 rounds of all that a rank has.
    assert FakeGroup(4).run(seconds)[0] == pytest.approx((6 * 0.5 + 6 / 4 * 8, 3 * (0.5 + 8)))

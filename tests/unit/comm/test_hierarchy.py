"""Sums over several levels of groups: right, and the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from hetexp.comm.compression import compressor_of
from hetexp.comm.exchange import Exchange
from hetexp.comm.hierarchy import HierarchicalExchange
from hetexp.comm.library_exchange import LibraryExchange
from hetexp.core.errors import PeerLostError, SetupError
from hetexp.core.topology import Group, Topology

T = TypeVar("T")
LENGTH = 1000


def gloo(*ranks: int) -> Group:
    return Group("gloo", ranks)


MIXED = Topology(((gloo(0, 1), gloo(3, 4, 5)), (gloo(0, 2, 3),)))
"""Two vendors' cards and a processor in one machine."""
HOSTS = Topology(((gloo(0, 1),), (gloo(0, 2), gloo(3, 4)), (gloo(0, 3),)))
"""A machine with two cards and a processor, and one with two processors."""
ROUTES = {"mixed": (MIXED, 6), "hosts": (HOSTS, 5), "leaders": (Topology(((gloo(1, 2),), (gloo(0, 1),))), 3)}


def exchange_of(route: Topology, rank: int, store: dist.Store) -> Exchange:
    levels = [
        LibraryExchange("gloo", dist.PrefixStore(f"{height}/{group.leader}", store), place, size, 30.0)
        for height, level in enumerate(route.levels)
        for group in level
        for place, size in [(group.ranks.index(rank) if rank in group.ranks else -1, len(group.ranks))]
        if place >= 0
    ]
    return HierarchicalExchange(levels, route, rank)


def each(route: Topology, world_size: int, function: Callable[[Exchange], T]) -> list[T]:
    store = dist.HashStore()

    def rank(number: int) -> T:
        exchange = exchange_of(route, number, store)
        assert (exchange.rank, exchange.size) == (number, world_size)
        result = function(exchange)
        exchange.close()
        return result

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size)))


def own(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.fixture(params=list(ROUTES))
def routed(request: pytest.FixtureRequest) -> tuple[Topology, int]:
    return ROUTES[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_ranks_get_one_sum(routed: tuple[Topology, int], dtype: torch.dtype) -> None:
    def one(exchange: Exchange) -> torch.Tensor:
        tensor = own(exchange.rank, dtype)
        exchange.sum_(tensor)
        return tensor

    sums = each(*routed, one)
    true = torch.stack([own(rank, dtype) for rank in range(routed[1])]).sum(dim=0)
    assert all(torch.equal(each, sums[0]) for each in sums)
    assert torch.allclose(sums[0], true, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-14)


def test_all_ranks_get_everyones_bytes_in_order(routed: tuple[Topology, int]) -> None:
    def one(exchange: Exchange) -> list[list[int]]:
        codes = exchange.gather(torch.tensor([exchange.rank, 100 + exchange.rank], dtype=torch.uint8))
        return [code.tolist() for code in codes]

    assert each(*routed, one) == [[[r, 100 + r] for r in range(routed[1])]] * routed[1]


def test_the_first_ranks_tensor_goes_to_all(routed: tuple[Topology, int]) -> None:
    def one(exchange: Exchange) -> torch.Tensor:
        tensor = own(exchange.rank, torch.float64)
        exchange.broadcast_(tensor)
        return tensor

    assert all(torch.equal(each, own(0, torch.float64)) for each in each(*routed, one))


@pytest.mark.parametrize(("wire", "allowed"), [("bfloat16", 0.03), ("int8", 0.06)])
def test_codes_travel_between_the_groups_only(
    routed: tuple[Topology, int], wire: str, allowed: float
) -> None:
    codec = compressor_of(wire)  # type: ignore[arg-type]
    assert codec is not None

    def rounds(exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        feedback, summed = torch.zeros(LENGTH), torch.zeros(LENGTH)
        for _ in range(20):
            first = own(exchange.rank)
            exchange.sum_coded_(first, codec, feedback)
            summed += first
        return first, summed, feedback

    ranks = each(*routed, rounds)
    true = torch.stack([own(rank) for rank in range(routed[1])]).sum(dim=0)
    assert all(torch.equal(one[0], ranks[0][0]) for one in ranks)
    assert 0 < float((ranks[0][0] - true).abs().max()) < 2 * allowed
    # What is lost of one sum is in the next one, and only those that send codes lose anything.
    assert float((ranks[0][1] - 20 * true).abs().max()) < allowed
    root = routed[0].levels[-1][0]
    assert [bool(one[2].any()) for one in ranks] == [rank in root.ranks for rank in range(routed[1])]


def test_a_rank_that_is_gone() -> None:
    def one(exchange: Exchange) -> None:
        if exchange.rank == 4:
            return
        with pytest.raises(PeerLostError):
            exchange.sum_(torch.ones(LENGTH))

    each(MIXED, 6, one)


def test_a_library_that_this_build_has_not() -> None:
    with pytest.raises(SetupError, match=r"torch .* has no xccl"):
        LibraryExchange("xccl", dist.HashStore(), 0, 1, 1.0)


def test_a_group_that_does_not_form() -> None:
    with pytest.raises(SetupError, match="the gloo group of 2 ranks did not form"):
        LibraryExchange("gloo", dist.HashStore(), 0, 2, 0.2)

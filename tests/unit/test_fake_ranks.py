"""The fake group tells the truth: every rank has its own value, and a reduction combines them."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_ranks import FakeGroup
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.comm.communicator import Communicator


@settings(deadline=None, max_examples=25)
@given(values=st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5))
def test_reductions_combine_different_values(values: list[int]) -> None:
    def rank(comm: Communicator) -> tuple[int, int, torch.dtype]:
        own = torch.tensor([values[comm.rank]])
        total, largest = comm.all_reduce(own), comm.all_reduce(own, "max")
        assert own.item() == values[comm.rank]
        return int(total), int(largest), total.dtype

    results = FakeGroup(len(values)).run(rank)
    assert results == [(sum(values), max(values), torch.int64)] * len(values)


def test_ranks_are_numbered_and_results_are_in_their_order() -> None:
    assert FakeGroup(4).run(lambda comm: (comm.rank, comm.world_size)) == [(r, 4) for r in range(4)]


def test_everyone_gets_everyone_s_tensor() -> None:
    results = FakeGroup(3).run(lambda comm: [int(one) for one in comm.all_gather(torch.tensor(comm.rank))])
    assert results == [[0, 1, 2]] * 3


def test_reductions_follow_each_other() -> None:
    def rank(comm: Communicator) -> list[float]:
        return [float(comm.all_reduce(torch.tensor(float(step * (comm.rank + 1))))) for step in range(20)]

    results = FakeGroup(3).run(rank)
    assert results == [[6.0 * step for step in range(20)]] * 3


def test_what_was_given_is_what_counts() -> None:
    def rank(comm: Communicator) -> float:
        value = torch.tensor(1.0 + comm.rank)
        pending = comm.all_reduce_async(value)
        value.fill_(100.0)
        return float(pending.wait())

    assert FakeGroup(2).run(rank) == [3.0, 3.0]


def test_several_under_way_at_once() -> None:
    def rank(comm: Communicator) -> tuple[float, float]:
        first = comm.all_reduce_async(torch.tensor(1.0 * comm.rank))
        second = comm.all_reduce_async(torch.tensor(10.0 * comm.rank), "max")
        return float(first.wait()), float(second.wait())

    assert FakeGroup(3).run(rank) == [(3.0, 20.0)] * 3


def test_results_are_the_ranks_own() -> None:
    def rank(comm: Communicator) -> float:
        result = comm.all_reduce(torch.zeros(1))
        result += comm.rank  # must not reach the others
        comm.barrier()
        return float(result)

    assert FakeGroup(3).run(rank) == [0.0, 1.0, 2.0]


def test_one_ranks_exception_ends_all_of_them() -> None:
    def rank(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 has had enough")
        comm.all_reduce(torch.ones(1))
        raise AssertionError("rank 1 never came")

    with pytest.raises(ValueError, match="rank 1 has had enough"):
        FakeGroup(3).run(rank)


def test_a_rank_that_leaves_early_is_missed() -> None:
    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.barrier()

    with pytest.raises(threading.BrokenBarrierError):
        FakeGroup(2, timeout_seconds=0.05).run(rank)


def test_different_shapes_are_an_error() -> None:
    with pytest.raises(RuntimeError):
        FakeGroup(2).run(lambda comm: comm.all_reduce(torch.zeros(1 + comm.rank)))

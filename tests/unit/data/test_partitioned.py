"""Samples partitioned for good: every one in exactly one part, every rank always in its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.core.split import apportion
from hetexp.data.partitioned import PartitionedSampler
from hetexp.data.sampler import GlobalSampler, Position

SHARES = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), min_size=1, max_size=4).filter(sum)


@settings(deadline=None, max_examples=60)
@given(
    num_samples=st.integers(1, 120),
    batch=st.integers(1, 40),
    shares=SHARES,
    seed=st.integers(0, 9),
)
def test_each_rank_goes_through_its_own_part_once_an_epoch(
    num_samples: int, batch: int, shares: list[float], seed: int
) -> None:
    sampler = PartitionedSampler(num_samples, batch, seed, shares)
    plain = GlobalSampler(num_samples, batch, seed)
    everything = np.concatenate(sampler.parts)
    assert sorted(everything.tolist()) == list(range(num_samples))
    assert sampler.steps_per_epoch == plain.steps_per_epoch
    position = other = Position()
    for epoch in range(2):
        taken: list[list[int]] = [[] for _ in shares]
        while position.epoch == epoch:
            indices, position = sampler.batch(position)
            same, other = plain.batch(other)
            assert len(indices) == len(same)  # samples in total are those of any strategy
            split = apportion(len(indices), shares)
            for rank in range(len(shares)):
                first, end = split.bounds(rank)
                taken[rank] += indices[first:end].tolist()
        assert position == other
        for mine, part in zip(taken, sampler.parts, strict=True):
            assert sorted(mine) == sorted(part.tolist())


def test_parts_hold_still_and_orders_do_not() -> None:
    one, other = PartitionedSampler(100, 10, 0, [3, 1]), PartitionedSampler(100, 10, 1, [3, 1])
    assert [len(part) for part in one.parts] == [80, 20]  # as 8 and 2 of each batch of ten
    assert set(one.parts[0].tolist()) != set(other.parts[0].tolist())
    first, _ = one.batch(Position(0, 0))
    again, _ = one.batch(Position(1, 0))
    assert first.tolist() != again.tolist()
    assert one.fingerprint() == PartitionedSampler(100, 10, 0, [3, 1]).fingerprint() != other.fingerprint()


@pytest.mark.parametrize(("offset", "goes_on"), [(0, 0), (5, 10), (10, 10), (21, 30)])
def test_a_position_of_another_batch_size_goes_on_with_a_whole_batch(offset: int, goes_on: int) -> None:
    sampler = PartitionedSampler(100, 10, 0, [3, 1])
    indices, after = sampler.batch(Position(0, offset))
    assert after == Position(0, goes_on + 10)
    assert set(indices[:8].tolist()) <= set(sampler.parts[0].tolist())

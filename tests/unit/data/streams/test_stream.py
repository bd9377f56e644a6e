"""A stream's samples are each taken once, in an order that the seed and the epoch alone decide."""

from __future__ import annotations

import gc
import logging
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import Rows
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hetexp.core.errors import ConfigError
from hetexp.core.split import Split, apportion
from hetexp.data.loader import LocalBatch, local_batches, read_ahead
from hetexp.data.prefetch import is_prefetchable
from hetexp.data.sampler import Position
from hetexp.data.samples import Collate
from hetexp.data.streams.passes import digest
from hetexp.data.streams.stream import Stream, StreamSampler, evaluation_batches, is_stream

SEED = 3
SIZES = st.integers(1, 12)
WEIGHTS = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=4).filter(any)


class Numbers(IterableDataset[Any]):
    """The numbers below `count`, shuffled by Python's generator; divided among loader processes, if any."""

    def __init__(self, count: int, shuffled: bool = True) -> None:
        self.count, self.shuffled = count, shuffled
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.count))
        if self.shuffled:
            random.shuffle(numbers)
        worker = get_worker_info()
        yield from numbers if worker is None else numbers[worker.id :: worker.num_workers]


class Quiet(Numbers):
    prefetchable = True


class Once:
    """Walks on where the last walk ended."""

    def __init__(self, count: int) -> None:
        self._numbers = iter(range(count))

    def __iter__(self) -> Iterator[int]:
        yield from self._numbers


def batches_of(
    source: Any,
    size: int,
    weights: Sequence[float] = (1.0,),
    rank: int = 0,
    start: Position | None = None,
    num_steps: int = 1000,
    drop_last: bool = False,
    overfit: int = 0,
    max_epochs: int | None = 2,
    collate: Callable[[list[Any]], Any] = default_collate,
    **options: Any,
) -> list[LocalBatch]:
    def split(step: int, count: int) -> Split:
        return apportion(count, weights)

    stream = Stream(source)
    sampler = StreamSampler(stream, size, SEED, drop_last, overfit, max_epochs)
    place = start or Position()
    loaded = local_batches(stream, sampler, place, num_steps, split, rank, collate=collate, **options)
    return list(loaded)


def numbers(batch: LocalBatch) -> list[int]:
    return [int(number) for numbers in batch.microbatches for number in numbers]


def facts(batch: LocalBatch) -> tuple[Any, ...]:
    return batch.position, batch.global_samples, batch.counts, batch.last, batch.drawn


# ---------------------------------------------------------------- each sample once


@settings(deadline=None)
@given(count=st.integers(1, 40), size=SIZES, weights=WEIGHTS, drop_last=st.booleans(), accumulate=SIZES)
def test_ranks_share_each_batch(
    count: int, size: int, weights: list[float], drop_last: bool, accumulate: int
) -> None:
    size = min(size, count)
    alone = [numbers(batch) for batch in batches_of(Numbers(count), size, drop_last=drop_last)]
    ranks = [
        batches_of(Numbers(count), size, weights, rank, drop_last=drop_last, accumulate=accumulate)
        for rank in range(len(weights))
    ]
    assert [sum((numbers(batch) for batch in step), []) for step in zip(*ranks, strict=True)] == alone
    for step in zip(*ranks, strict=True):
        assert len({facts(batch) for batch in step}) == 1
    full, left = divmod(count, size)
    steps = full if drop_last or not left else full + 1
    assert len(alone) == 2 * steps
    for epoch in (alone[:steps], alone[steps:]):
        seen = sum(epoch, [])
        assert len(set(seen)) == len(seen) == (full * size if drop_last else count)
        assert set(seen) <= set(range(count))
    assert [batch.last for batch in ranks[0]] == [False] * (2 * steps - 1) + [True]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("weights", [(1.0,), (5.0, 2.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("workers", [1, 3])
def test_loader_processes_change_nothing(drop_last: bool, weights: tuple[float, ...], workers: int) -> None:
    for rank in range(len(weights)):
        common = (Numbers(23), 8, weights, rank)
        here = batches_of(*common, drop_last=drop_last)
        there = batches_of(*common, drop_last=drop_last, num_workers=workers)
        assert [(numbers(b), b.indices, facts(b)) for b in there] == [
            (numbers(b), b.indices, facts(b)) for b in here
        ]


@settings(deadline=None)
@given(count=st.integers(1, 30), size=SIZES, at=st.integers(0, 40), drop_last=st.booleans())
def test_a_walk_goes_on_anywhere(count: int, size: int, at: int, drop_last: bool) -> None:
    size = min(size, count)
    whole = batches_of(Numbers(count), size, drop_last=drop_last, max_epochs=3)
    at = min(at, len(whole))
    start = whole[at - 1].position if at else Position()
    rest = batches_of(Numbers(count), size, start=start, drop_last=drop_last, max_epochs=3)
    assert [(numbers(b), facts(b)) for b in rest] == [(numbers(b), facts(b)) for b in whole[at:]]


def test_a_position_of_another_batch_size_goes_on_at_its_sample() -> None:
    whole = sum((numbers(batch) for batch in batches_of(Numbers(20), 4, max_epochs=1)), [])
    rest = batches_of(Numbers(20), 6, start=Position(0, 12), max_epochs=1)
    assert sum((numbers(batch) for batch in rest), []) == whole[12:]


def test_a_position_at_the_end_begins_the_next_epoch() -> None:
    whole = batches_of(Numbers(20), 4)
    rest = batches_of(Numbers(20), 4, start=Position(0, 20))
    assert [numbers(b) for b in rest] == [numbers(b) for b in whole[5:]]


def test_a_batch_is_taken_again_without_another_walk() -> None:
    source = Numbers(20)
    sampler = StreamSampler(Stream(source), 6, SEED)
    first, after = sampler.batch(Position())
    samples = sampler.stream.__getitems__(first.tolist())
    again, _ = sampler.batch(Position())
    assert sampler.stream.__getitems__(again.tolist()) == samples
    sampler.batch(after)
    assert source.epochs == [0]
    with pytest.raises(IndexError):
        sampler.stream[0]


def test_overfitting_repeats_the_first_batches() -> None:
    batches = [numbers(batch) for batch in batches_of(Numbers(20), 6, overfit=2, max_epochs=3)]
    assert batches == batches[:2] * 3


def test_the_steps_of_an_epoch_are_those_of_its_length() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.count

    class Refusing(Numbers):
        def __len__(self) -> int:
            raise TypeError

    assert StreamSampler(Stream(Sized(20)), 6, SEED).steps_per_epoch == 4
    assert StreamSampler(Stream(Sized(20)), 6, SEED, drop_last=True).steps_per_epoch == 3
    assert StreamSampler(Stream(Sized(20)), 6, SEED, overfit_batches=2).steps_per_epoch == 2
    assert Stream(Refusing(20)).length is None


# ---------------------------------------------------------------- random numbers


def test_the_seed_and_the_epoch_decide_the_order() -> None:
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        orders.append([numbers(batch) for batch in batches_of(Numbers(40), 8)])
    assert orders[0] == orders[1]
    assert orders[0][:5] != orders[0][5:]


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand(), lambda: float(torch.rand(()))])
def test_the_trainings_own_random_numbers_stay(draw: Callable[[], float]) -> None:
    def drawn(walks: bool) -> list[float]:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        stream, values = Stream(Rows(20)), []
        for offset in range(5):
            values.append(draw())
            if walks:
                stream.go_to(0, offset)
                stream.hold(1)
        return values

    assert drawn(walks=True) == drawn(walks=False)


def test_samples_do_not_depend_on_what_is_drawn_between_them() -> None:
    def samples(draws: bool) -> torch.Tensor:
        sampler, rows = StreamSampler(Stream(Rows(20)), 4, SEED), []
        position = Position()
        for _ in range(5):
            indices, position = sampler.batch(position)
            rows += [row for row, _ in sampler.stream.__getitems__(indices.tolist())]
            if draws:
                random.random(), np.random.rand(), torch.rand(3)
        return torch.stack(rows)

    assert torch.equal(samples(draws=True), samples(draws=False))


def test_an_epoch_is_told_to_the_data() -> None:
    source = Numbers(10)
    batches_of(source, 4, max_epochs=3)
    assert source.epochs == [0, 1, 2]


# ---------------------------------------------------------------- forms, threads, processes


def test_only_a_class_that_allows_it_is_walked_by_a_thread() -> None:
    assert is_prefetchable(Stream(Quiet(10)))
    assert not is_prefetchable(Stream(Numbers(10)))
    here, there = (batches_of(kind(23, shuffled=False), 8) for kind in (Numbers, Quiet))
    assert [(numbers(b), facts(b)) for b in here] == [(numbers(b), facts(b)) for b in there]
    assert read_ahead(Stream(Numbers(10)), num_workers=3, prefetch_factor=4) == 4  # one process


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, Quiet])
def test_batches_without_rows_are_cut_by_their_samples(workers: int, kind: type[Numbers]) -> None:
    def pairs(samples: list[int]) -> tuple[set[int], set[int]]:
        return set(samples), {10 * sample for sample in samples}

    for batch in batches_of(
        kind(23, shuffled=False), 8, (3.0, 1.0), 0, collate=Collate(pairs), num_workers=workers
    ):
        (microbatch,) = batch.microbatches
        first, rest = microbatch.part(0, 2), microbatch.part(2, batch.local_samples)
        assert first[0] | rest[0] == microbatch[0] == set(batch.indices[0])
        assert first[1] == {10 * sample for sample in first[0]}
        assert len(first[0]) == 2


def test_a_copy_for_another_process_begins_its_own_walk() -> None:
    stream = Stream(Numbers(10, shuffled=False))
    stream.go_to(0, 3)
    copy = pickle.loads(pickle.dumps(stream))
    copy.go_to(0, 5)
    assert copy.hold(2) == 2
    assert copy.__getitems__([5, 6]) == [5, 6]


def test_evaluation_batches_end_with_the_pass() -> None:
    stream = Stream(Numbers(10, shuffled=False))
    assert [b.tolist() for b in evaluation_batches(stream, 4, SEED)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [b.tolist() for b in evaluation_batches(stream, 4, SEED, most=2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# ---------------------------------------------------------------- what cannot train


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_stream_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match="its stream is empty"):
        batches_of(Numbers(0), 4, num_workers=workers)
    gc.collect()  # the error's frames hold the process
    with pytest.raises(ConfigError, match="its stream is empty"):
        Stream(Numbers(0)).first(1)


def test_a_stream_smaller_than_a_batch_is_refused_with_drop_last() -> None:
    with pytest.raises(ConfigError, match="`trainer.global_batch_size` must be at most the 3 samples"):
        batches_of(Numbers(3), 4, drop_last=True)


def test_a_stream_that_gives_its_samples_once_has_one_epoch() -> None:
    stream = Stream(Once(10))
    assert stream.first(2) == [0, 1]
    assert [b.tolist() for b in evaluation_batches(stream, 4, SEED)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(ConfigError, match="gave none in epoch 1"):
        batches_of(Once(10), 4)


def test_a_walk_that_begins_differently_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Unseeded(Numbers):
        def __iter__(self) -> Iterator[Any]:
            yield from np.random.default_rng().random(self.count)

    for source, warnings in ((Numbers(50), 0), (Unseeded(50), 1)):
        caplog.clear()
        stream = Stream(source)
        stream.first(1)
        with caplog.at_level(logging.WARNING):
            stream.go_to(1, 0)
            stream.go_to(0, 0)
        assert len(caplog.records) == warnings


@pytest.mark.parametrize(
    "value", [iter([1]), "text", {1, 2}, {"a": 1}, [1, 2], torch.ones(3), (n for n in [1]), 3]
)
def test_what_is_no_stream(value: Any) -> None:
    assert not is_stream(value)


# ---------------------------------------------------------------- what ranks compare


def test_digests_tell_samples_apart() -> None:
    samples = [
        torch.tensor([1.0, 0.0]),
        torch.tensor([0.0, 1.0]),
        np.array([1, 5]),
        {"text": "a", "label": 1},
        {"text": "b", "label": 1},
        {"text": "a", "label": 2},
        (torch.ones(2), 3),
        (torch.ones(2), 4),
        b"bytes",
    ]
    assert len({digest(sample) for sample in samples}) == len(samples)


def test_digests_forgive_rounding() -> None:
    value = torch.rand(1000)
    assert digest(value) == pytest.approx(digest(value * (1 + 1e-7)), rel=1e-6)
    assert digest(torch.tensor([float("nan"), 1.0])) == digest(torch.tensor([float("nan"), 1.0]))

"""A rank's microbatches: together with the other ranks' they are the global batch, in its order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from hetexp.core.split import Split, apportion
from hetexp.data.loader import LocalBatch, chop, cut, local_batches, read_ahead
from hetexp.data.sampler import GlobalSampler, Position

SIZES = st.integers(1, 30)
WEIGHTS = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=4).filter(any)


class Numbers(Dataset[Any]):
    """Sample i is `(i, 10 × i)`; remembers what was asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(index)
        return torch.tensor(index), torch.tensor(10 * index)


def steps_of(
    sampler: GlobalSampler,
    weights: Sequence[float],
    rank: int,
    num_steps: int,
    start: Position | None = None,
    dataset: Numbers | None = None,
    **options: Any,
) -> list[LocalBatch]:
    def split(step: int, count: int) -> Split:
        return apportion(count, weights)

    dataset = dataset or Numbers(sampler.num_samples)
    return list(local_batches(dataset, sampler, start or Position(), num_steps, split, rank, **options))


def numbers(batch: LocalBatch) -> list[int]:
    return [int(number) for inputs, _ in batch.microbatches for number in inputs]


def global_batches(sampler: GlobalSampler, num_steps: int, start: Position | None = None) -> list[list[int]]:
    batches, position = [], start or Position()
    for _ in range(num_steps):
        indices, position = sampler.batch(position)
        batches.append(indices.tolist())
    return batches


# ---------------------------------------------------------------- cut and chop


@settings(deadline=None)
@given(count=st.integers(0, 300), accumulate=st.integers(1, 20), size=st.none() | st.integers(1, 40))
def test_pieces_are_even_and_add_up(count: int, accumulate: int, size: int | None) -> None:
    sizes = cut(count, accumulate, size)
    assert sum(sizes) == count
    assert all(piece > 0 for piece in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    if size is None:
        assert len(sizes) == min(accumulate, count)
    else:
        assert max(sizes, default=0) <= size
        assert len(sizes) == -(-count // size)


@pytest.mark.parametrize(
    ("count", "accumulate", "size", "sizes"),
    [
        (0, 1, None, []),
        (0, 4, None, []),
        (0, 1, 8, []),
        (8, 1, None, [8]),
        (8, 3, None, [3, 3, 2]),
        (2, 4, None, [1, 1]),
        (9, 1, 4, [3, 3, 3]),
        (8, 1, 4, [4, 4]),
        (3, 1, 4, [3]),
    ],
)
def test_known_cuts(count: int, accumulate: int, size: int | None, sizes: list[int]) -> None:
    assert cut(count, accumulate, size) == sizes


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 9), max_size=8))
def test_chop_keeps_order_and_sizes(sizes: list[int]) -> None:
    items = list(range(100, 100 + sum(sizes)))
    pieces = list(chop(items, sizes))
    assert [len(piece) for piece in pieces] == sizes
    assert [item for piece in pieces for item in piece] == items


# ---------------------------------------------------------------- local_batches


@settings(deadline=None, max_examples=40)
@given(
    num_samples=SIZES,
    batch_size=SIZES,
    weights=WEIGHTS,
    accumulate=st.integers(1, 3),
    drop_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_ranks_parts_are_the_global_batch_in_order(
    num_samples: int, batch_size: int, weights: list[float], accumulate: int, drop_last: bool, seed: int
) -> None:
    sampler = GlobalSampler(num_samples, batch_size, seed, drop_last and num_samples >= batch_size)
    num_steps = 2 * sampler.steps_per_epoch + 1
    ranks = [
        steps_of(sampler, weights, rank, num_steps, accumulate=accumulate) for rank in range(len(weights))
    ]
    expected = global_batches(sampler, num_steps)
    for step, whole in enumerate(expected):
        parts = [rank[step] for rank in ranks]
        assert [number for part in parts for number in numbers(part)] == whole
        assert {part.global_samples for part in parts} == {len(whole)}
        assert sum(part.local_samples for part in parts) == len(whole)
        assert len({part.position for part in parts}) == 1
        for part, weight in zip(parts, weights, strict=True):
            assert part.local_samples == len(numbers(part))
            assert weight > 0 or part.microbatches == []
    for rank in ranks:
        assert len(rank) == num_steps


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [17.0, 4.0], [0.0, 1.0], [0.8, 0.15, 0.05]])
def test_different_splits_see_the_same_samples(weights: list[float]) -> None:
    sampler = GlobalSampler(25, 8, seed=3)
    ranks = [steps_of(sampler, weights, rank, 4) for rank in range(len(weights))]
    epoch = [sorted(number for rank in ranks for number in numbers(rank[step])) for step in range(4)]
    assert epoch == [sorted(batch) for batch in global_batches(sampler, 4)]
    assert sorted(number for batch in epoch for number in batch) == list(range(25))


def test_an_empty_share_has_no_microbatch_and_stays_in_step() -> None:
    sampler = GlobalSampler(11, 8, seed=0)
    rank = steps_of(sampler, [0.8, 0.15, 0.05], 2, 4)
    assert [batch.local_samples for batch in rank] == [0, 0, 0, 0]
    assert [batch.microbatches for batch in rank] == [[]] * 4
    assert [batch.global_samples for batch in rank] == [8, 3, 8, 3]
    assert [batch.position for batch in rank] == [
        Position(0, 8),
        Position(1, 0),
        Position(1, 8),
        Position(2, 0),
    ]


def test_a_share_that_is_empty_now_and_then() -> None:
    sampler = GlobalSampler(9, 8, seed=0)  # 8 and 1 samples
    first, second = (steps_of(sampler, [1.0, 1.0], rank, 4) for rank in range(2))
    assert [batch.local_samples for batch in first] == [4, 1, 4, 1]
    assert [batch.local_samples for batch in second] == [4, 0, 4, 0]
    assert [len(batch.microbatches) for batch in second] == [1, 0, 1, 0]


def test_microbatches_hold_inputs_and_targets() -> None:
    sampler = GlobalSampler(8, 8, seed=1)
    (batch,) = steps_of(sampler, [3.0, 1.0], 0, 1, accumulate=4)
    assert [len(inputs) for inputs, _ in batch.microbatches] == [2, 2, 1, 1]
    for inputs, targets in batch.microbatches:
        assert torch.equal(targets, 10 * inputs)


def test_microbatch_size_is_a_limit_on_every_rank() -> None:
    sampler = GlobalSampler(16, 16, seed=1)
    for rank, pieces in ((0, [4, 4, 4]), (1, [4])):
        (batch,) = steps_of(sampler, [3.0, 1.0], rank, 1, microbatch_size=4)
        assert [len(inputs) for inputs, _ in batch.microbatches] == pieces


@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_a_run_goes_on_at_its_position(step: int) -> None:
    sampler = GlobalSampler(25, 8, seed=5)
    whole = steps_of(sampler, [2.0, 1.0], 1, 10)
    again = steps_of(GlobalSampler(25, 8, seed=5), [2.0, 1.0], 1, 10 - step, start=whole[step - 1].position)
    assert [numbers(batch) for batch in again] == [numbers(batch) for batch in whole[step:]]
    assert [batch.position for batch in again] == [batch.position for batch in whole[step:]]


def test_a_run_goes_on_with_another_split() -> None:
    sampler = GlobalSampler(25, 8, seed=5)
    position = steps_of(sampler, [1.0], 0, 2)[-1].position
    ranks = [steps_of(sampler, [1.0, 3.0], rank, 5, start=position) for rank in range(2)]
    rest = [[number for rank in ranks for number in numbers(rank[step])] for step in range(5)]
    assert rest == global_batches(sampler, 7)[2:]


def test_a_rank_loads_no_sample_but_its_own() -> None:
    sampler = GlobalSampler(12, 6, seed=2)
    dataset = Numbers(12)
    batches = steps_of(sampler, [2.0, 1.0], 1, 2, dataset=dataset)
    assert dataset.asked == [number for batch in batches for number in numbers(batch)]
    assert len(dataset.asked) == 4


def test_no_steps_no_batches() -> None:
    dataset = Numbers(4)
    assert steps_of(GlobalSampler(4, 2, seed=0), [1.0], 0, 0, dataset=dataset) == []
    assert dataset.asked == []


def test_loading_goes_no_further_than_the_step() -> None:
    sampler, dataset = GlobalSampler(12, 4, seed=2), Numbers(12)
    batches = local_batches(dataset, sampler, Position(), 3, lambda step, n: Split((n,)), 0, num_workers=0)
    next(batches)
    assert len(dataset.asked) == 4


class Changing:
    """A split that changes with the step; remembers the steps that were asked for."""

    def __init__(self, counts: Mapping[int, Sequence[int]]) -> None:
        self.counts = counts
        self.asked: list[int] = []

    def __call__(self, step: int, count: int) -> Split:
        self.asked.append(step)
        return Split(tuple(self.counts[max(first for first in self.counts if first <= step)]))


def test_splits_that_change_see_every_sample_once() -> None:
    sampler = GlobalSampler(400, 20, seed=4)
    splits = {0: [10, 10], 5: [16, 4], 9: [20, 0], 12: [10, 10]}
    ranks = [
        list(local_batches(Numbers(400), sampler, Position(), 20, Changing(splits), rank))
        for rank in range(2)
    ]
    steps = [[number for rank in ranks for number in numbers(rank[step])] for step in range(20)]
    assert steps == global_batches(sampler, 20)
    assert sorted(number for step in steps for number in step) == list(range(400))
    assert [batch.local_samples for batch in ranks[0]] == [10] * 5 + [16] * 4 + [20] * 3 + [10] * 8


def test_a_run_that_goes_on_asks_for_its_own_steps() -> None:
    split = Changing({0: [4], 7: [4]})
    sampler = GlobalSampler(40, 4, seed=4)
    list(local_batches(Numbers(40), sampler, Position(0, 28), 2, split, 0, first_step=7))
    assert set(split.asked) == {7, 8}


@pytest.mark.parametrize("counts", [[4, 0], [0, 4]])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loader_looks_no_further_ahead_than_it_says(counts: list[int], num_workers: int) -> None:
    # Also for a rank without samples, whose loader would else run through to the end.
    sampler, split = GlobalSampler(80, 4, seed=2), Changing({0: counts})
    batches = local_batches(
        Numbers(80), sampler, Position(), 20, split, 0, num_workers=num_workers, accumulate=2
    )
    for step in range(5):
        next(batches)
        assert max(split.asked) <= step + read_ahead(Numbers(80), num_workers)
    batches.close()


@pytest.mark.parametrize("counts", [[4, 0], [0, 4]])
def test_a_thread_looks_one_step_ahead(counts: list[int]) -> None:
    sampler, split = GlobalSampler(80, 4, seed=2), Changing({0: counts})
    batches = local_batches(in_rows(80), sampler, Position(), 20, split, 0, accumulate=2)
    for step in range(5):
        next(batches)
        assert max(split.asked) <= step + read_ahead(in_rows(80)) == step + 1
    batches.close()
    assert split.asked in (list(range(5)), list(range(6)))  # each once


def in_rows(count: int) -> TensorDataset:
    """The samples of `Numbers`, as rows of tensors."""
    return TensorDataset(torch.arange(count), 10 * torch.arange(count))


def test_how_far_a_loader_reads_ahead() -> None:
    assert [read_ahead(in_rows(4), workers) for workers in (0, 1, 3)] == [1, 2, 6]
    assert [read_ahead(Numbers(4), workers, 5) for workers in (0, 1, 3)] == [0, 5, 15]
    assert read_ahead(in_rows(4), 0, collate=lambda samples: default_collate(samples)) == 0


WAYS: list[tuple[Callable[[int], Dataset[Any]], dict[str, Any]]] = [
    (Numbers, {}),
    (in_rows, {}),  # by a thread
    (in_rows, {"threaded": False}),
    (in_rows, {"num_workers": 2, "prefetch_factor": 3}),
]


@pytest.mark.parametrize("changes", [{0: [10, 10]}, {0: [10, 10], 5: [16, 4], 9: [20, 0], 12: [3, 17]}])
def test_every_way_of_loading_gives_the_same(changes: dict[int, list[int]]) -> None:
    """Microbatches, their order, and the random numbers that are left for the model (invariant 1)."""
    found = []
    for make, options in WAYS:
        torch.manual_seed(5)
        sampler, split = GlobalSampler(110, 20, seed=4), Changing(changes)
        ranks = [
            list(
                local_batches(
                    make(110),
                    sampler,
                    Position(),
                    17,
                    lambda step, n: apportion(n, split(step, n).counts),
                    rank,
                    accumulate=3,
                    **options,
                )
            )
            for rank in range(2)
        ]
        steps = [[number for rank in ranks for number in numbers(rank[step])] for step in range(17)]
        assert steps == global_batches(sampler, 17)
        pieces = [[[inputs.tolist() for inputs, _ in batch.microbatches] for batch in rank] for rank in ranks]
        assert [[batch.indices for batch in rank] for rank in ranks] == pieces
        kinds = {type(microbatch) for rank in ranks for batch in rank for microbatch in batch.microbatches}
        facts = [[(b.position, b.counts, b.local_samples, b.global_samples) for b in rank] for rank in ranks]
        found.append((pieces, facts, kinds, torch.rand(3).tolist()))
    assert all(one == found[0] for one in found)


class Noisy(Numbers):
    """Draws a number for each sample, as a random crop does."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.rand(())


def test_random_samples_are_drawn_in_the_steps_order() -> None:
    """Among the model's own numbers, as torch's loader in the same thread draws them."""
    dataset, sampler = Noisy(24), GlobalSampler(24, 8, seed=1)
    torch.manual_seed(3)
    drawn = []
    for batch in local_batches(dataset, sampler, Position(), 3, lambda step, n: Split((n,)), 0):
        drawn += [*batch.microbatches[0][1].tolist(), torch.rand(()).item()]
    torch.manual_seed(3)
    expected = []
    for _, targets in DataLoader(dataset, batch_sampler=global_batches(sampler, 3)):
        expected += [*targets.tolist(), torch.rand(()).item()]
    assert drawn == expected


class Broken(Numbers):
    prefetchable = True

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 5:
            raise OSError("sample 5 cannot be read")
        return super().__getitem__(index)


def test_a_sample_that_fails_in_the_thread_fails_in_its_step() -> None:
    sampler = GlobalSampler(16, 4, seed=0)
    at = next(step for step, batch in enumerate(global_batches(sampler, 4)) if 5 in batch)
    batches = local_batches(Broken(16), sampler, Position(), 4, lambda step, n: Split((n,)), 0)
    for _ in range(at):
        next(batches)
    with pytest.raises(OSError, match="sample 5 cannot be read"):
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name == "hetexp-prefetch"]


class Rows(Numbers):
    """Gives many samples at once, as data sets of Hugging Face do."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.asked += [-len(indices)]
        return [(torch.tensor(index), torch.tensor(10 * index)) for index in indices]


def test_a_data_set_that_gives_many_samples_at_once() -> None:
    dataset = Rows(8)
    (batch,) = steps_of(GlobalSampler(8, 8, seed=1), [3.0, 1.0], 0, 1, dataset=dataset, accumulate=2)
    assert dataset.asked == [-3, -3]
    assert sorted(numbers(batch)) == sorted(GlobalSampler(8, 8, seed=1).batch(Position())[0][:6].tolist())


@pytest.mark.parametrize(("first_step", "draws"), [(0, True), (3, False)])
def test_only_the_first_step_of_a_run_draws_the_number_of_torchs_loader(first_step: int, draws: bool) -> None:
    """A resumed run has drawn it before, and its random numbers are those of the run that went on."""
    sampler = GlobalSampler(8, 4, seed=0)
    before = torch.get_rng_state()
    steps_of(sampler, [1.0], 0, 2, first_step=first_step)
    assert torch.equal(torch.get_rng_state(), before) != draws

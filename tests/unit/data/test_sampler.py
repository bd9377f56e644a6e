"""The order of the samples: a function of the seed and of the position, of nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.core.errors import ConfigError
from hetexp.data.sampler import GlobalSampler, Position

SIZES = st.integers(1, 200)
SEEDS = st.integers(0, 2**63)

# Of 10 samples and seed 7: checkpoints rely on it, so that it must never change.
ORDER = [0, 8, 5, 2, 3, 4, 9, 7, 6, 1]
FINGERPRINT = "e59c6da149d22a45"


def stream(sampler: GlobalSampler, start: Position, num_steps: int) -> tuple[list[list[int]], Position]:
    """Return the batches of so many steps, and the position after them."""
    batches, position = [], start
    for _ in range(num_steps):
        indices, position = sampler.batch(position)
        batches.append(indices.tolist())
    return batches, position


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@settings(deadline=None)
@given(num_samples=SIZES, batch_size=SIZES, seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_uses_every_sample_once(num_samples: int, batch_size: int, seed: int, epoch: int) -> None:
    sampler = GlobalSampler(num_samples, batch_size, seed)
    batches, after = stream(sampler, Position(epoch), sampler.steps_per_epoch)
    assert sorted(flat(batches)) == list(range(num_samples))
    assert after == Position(epoch + 1, 0)
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    assert len(batches[-1]) == (num_samples % batch_size or batch_size)


@settings(deadline=None)
@given(num_samples=SIZES, first=SIZES, second=SIZES, seed=SEEDS)
def test_the_order_does_not_depend_on_the_batch_size(
    num_samples: int, first: int, second: int, seed: int
) -> None:
    orders = []
    for batch_size in (first, second):
        sampler = GlobalSampler(num_samples, batch_size, seed)
        orders.append(flat(stream(sampler, Position(), 2 * sampler.steps_per_epoch)[0]))
    assert orders[0] == orders[1]


@settings(deadline=None)
@given(
    num_samples=SIZES,
    batch_size=st.integers(1, 30),
    seed=SEEDS,
    drop_last=st.booleans(),
    overfit_batches=st.integers(0, 3),
    done=st.integers(0, 30),
)
def test_resuming_anywhere_gives_the_same_stream(
    num_samples: int, batch_size: int, seed: int, drop_last: bool, overfit_batches: int, done: int
) -> None:
    batch_size = min(batch_size, num_samples)

    def fresh() -> GlobalSampler:
        return GlobalSampler(num_samples, batch_size, seed, drop_last, overfit_batches)

    before, position = stream(fresh(), Position(), done)
    saved = json.loads(json.dumps(position.to_dict()))
    after, _ = stream(fresh(), Position.from_dict(saved), 10)
    assert before + after == stream(fresh(), Position(), done + 10)[0]


@settings(deadline=None)
@given(num_samples=SIZES, first=SIZES, second=SIZES, seed=SEEDS, done=st.integers(0, 20))
def test_another_batch_size_goes_on_at_the_same_sample(
    num_samples: int, first: int, second: int, seed: int, done: int
) -> None:
    old, new = GlobalSampler(num_samples, first, seed), GlobalSampler(num_samples, second, seed)
    before, position = stream(old, Position(), min(done, old.steps_per_epoch))
    rest = []
    while position.epoch == 0:
        indices, position = new.batch(position)
        rest.append(indices.tolist())
    assert flat(before + rest) == flat(stream(old, Position(), old.steps_per_epoch)[0])


def test_drop_last_leaves_out_a_short_batch_only() -> None:
    sampler = GlobalSampler(10, 4, seed=0, drop_last=True)
    assert sampler.steps_per_epoch == 2
    batches, after = stream(sampler, Position(), 2)
    assert [len(batch) for batch in batches] == [4, 4]
    assert after == Position(1, 0)
    # 7 were used with another batch size: 3 are left, too few.
    assert sampler.batch(Position(0, 7))[1] == Position(1, 4)
    assert GlobalSampler(8, 4, seed=0, drop_last=True).steps_per_epoch == 2


def test_drop_last_refuses_data_smaller_than_one_batch() -> None:
    with pytest.raises(ConfigError) as caught:
        GlobalSampler(3, 4, seed=0, drop_last=True)
    assert caught.value.problems == [
        "`trainer.global_batch_size` must be at most the 3 training samples where `trainer.drop_last` is "
        "true, but is 4 instead."
    ]
    assert GlobalSampler(3, 4, seed=0).steps_per_epoch == 1


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one training sample, but holds 0"):
        GlobalSampler(0, 4, seed=0)


@pytest.mark.parametrize("offset", [10, 11, 1000])
def test_an_offset_at_or_past_the_end_means_the_next_epoch(offset: int) -> None:
    sampler = GlobalSampler(10, 4, seed=0)
    indices, after = sampler.batch(Position(2, offset))
    expected, _ = sampler.batch(Position(3, 0))
    assert np.array_equal(indices, expected)
    assert after == Position(3, 4)


def test_overfitting_repeats_the_first_batches_of_epoch_0() -> None:
    plain = GlobalSampler(100, 8, seed=3)
    sampler = GlobalSampler(100, 8, seed=3, overfit_batches=2)
    first = stream(plain, Position(), 2)[0]
    assert sampler.steps_per_epoch == 2
    assert stream(sampler, Position(), 6)[0] == first * 3
    assert GlobalSampler(10, 8, seed=3, overfit_batches=5).steps_per_epoch == 2


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    one, two = GlobalSampler(100, 100, seed=1), GlobalSampler(100, 100, seed=2)
    orders = [s.batch(Position(epoch))[0].tolist() for s in (one, two) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_changing_a_batch_leaves_the_order_alone() -> None:
    sampler = GlobalSampler(10, 4, seed=0)
    indices, _ = sampler.batch(Position())
    kept = indices.tolist()
    indices[:] = 0
    assert sampler.batch(Position())[0].tolist() == kept


def test_the_order_is_the_same_with_every_numpy() -> None:
    sampler = GlobalSampler(10, 10, seed=7)
    indices, _ = sampler.batch(Position())
    assert indices.dtype == np.int64
    assert indices.tolist() == ORDER
    assert sampler.fingerprint() == FINGERPRINT


def test_the_fingerprint_tells_orders_apart() -> None:
    def fingerprint(num_samples: int, seed: int) -> str:
        return GlobalSampler(num_samples, 4, seed).fingerprint()

    assert len({fingerprint(10, 0), fingerprint(10, 1), fingerprint(11, 0)}) == 3
    sampler = GlobalSampler(10, 4, 0)
    sampler.batch(Position(5))
    assert sampler.fingerprint() == fingerprint(10, 0)


@pytest.mark.parametrize("values", [(-1, 0), (0, -1)])
def test_a_position_is_never_negative(values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        Position(*values)


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 40),
    batch=st.integers(1, 12),
    before=st.integers(1, 12),
    steps=st.integers(0, 30),
    drop_last=st.booleans(),
)
def test_steps_left_lead_to_the_end_of_the_epochs(
    num_samples: int, batch: int, before: int, steps: int, drop_last: bool
) -> None:
    drop_last = drop_last and num_samples >= max(batch, before)
    earlier = GlobalSampler(num_samples, before, 0, drop_last)
    position = Position()
    for _ in range(steps):
        _, position = earlier.batch(position)
    sampler, epochs = GlobalSampler(num_samples, batch, 0, drop_last), 3
    left = sampler.steps_left(position, epochs)
    if before == batch:
        assert left == max(0, epochs * sampler.steps_per_epoch - steps)
    if not left:
        assert sampler.batch(position)[1].epoch >= epochs
    for number in range(left):
        _, position = sampler.batch(position)
        assert (position.epoch >= epochs) == (number + 1 == left)

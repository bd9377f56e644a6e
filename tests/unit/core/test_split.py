"""Integer shares: exact sums, no sample for who asked for none, the same answer everywhere."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.core.split import Split, apportion, normalise

EXTREMES = (0.0, 5e-324, 1e-300, 1e-9, 1.0, 3.0, 1e300, sys.float_info.max)
WEIGHT = st.one_of(st.floats(0, 10), st.integers(0, 5).map(float), st.sampled_from(EXTREMES))
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=8).filter(any)
TOTAL = st.one_of(st.integers(0, 40), st.integers(0, 10**6))


def quotas(total: int, weights: list[float]) -> list[Fraction]:
    """Exact shares of the batch, without a floating-point error."""
    whole = sum(Fraction(w) for w in weights)
    return [Fraction(w) * total / whole for w in weights]


@settings(deadline=None)
@given(total=TOTAL, weights=WEIGHTS)
def test_counts_sum_to_the_total_and_are_the_quota_rounded(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights).counts
    assert sum(counts) == total
    assert all(isinstance(count, int) for count in counts)
    for count, quota in zip(counts, quotas(total, weights), strict=True):
        assert math.floor(quota) <= count <= math.ceil(quota)


@settings(deadline=None)
@given(total=TOTAL, weights=WEIGHTS)
def test_a_weight_of_zero_never_gets_a_sample(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights).counts
    assert all(count == 0 for count, weight in zip(counts, weights, strict=True) if weight == 0)


@settings(deadline=None)
@given(total=TOTAL, weights=WEIGHTS)
def test_a_larger_weight_never_gets_fewer_samples(total: int, weights: list[float]) -> None:
    counts = [count for _, count in sorted(zip(weights, apportion(total, weights).counts, strict=True))]
    assert counts == sorted(counts)


@settings(deadline=None)
@given(total=TOTAL, weights=WEIGHTS, scale=st.sampled_from([0.25, 2.0, 1024.0]))
def test_only_the_proportions_count(total: int, weights: list[float], scale: float) -> None:
    # Powers of two change no bit of the mantissa, unless a value leaves the range of floats.
    scaled = [w * scale for w in weights]
    if any(math.isinf(s) or (w and s / scale != w) for w, s in zip(weights, scaled, strict=True)):
        return
    assert apportion(total, scaled) == apportion(total, weights)
    assert apportion(total, tuple(weights)) == apportion(total, weights)


@settings(deadline=None)
@given(total=st.integers(0, 200), data=st.data())
def test_a_permutation_moves_the_counts_along_but_for_ties(total: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(0, 9).map(float), min_size=2, max_size=6).filter(any))
    order = data.draw(st.permutations(range(len(weights))))
    straight = apportion(total, weights).counts
    permuted = apportion(total, [weights[i] for i in order]).counts
    back = {rank: permuted[place] for place, rank in enumerate(order)}
    exact = quotas(total, weights)
    # Only ranks with the same remainder may swap the left-over samples between them.
    changed = {exact[r] - math.floor(exact[r]) for r in range(len(weights)) if back[r] != straight[r]}
    assert len(changed) <= 1


@pytest.mark.parametrize(
    ("total", "weights", "counts"),
    [
        (8, [3, 1], (6, 2)),
        (8, [7, 1], (7, 1)),
        (8, [0.8, 0.15, 0.05], (7, 1, 0)),
        (3, [0.8, 0.15, 0.05], (2, 1, 0)),
        (5, [1, 1], (3, 2)),  # a tie goes to the lower rank
        (2, [1, 1, 1], (1, 1, 0)),
        (1, [0, 1, 1], (0, 1, 0)),
        (49, [1] * 49, (1,) * 49),  # 49 × (1/49) is below 1 in floating point
        (10, [0.1] * 10, (1,) * 10),
        (100, [1e308] * 3, (34, 33, 33)),
        (100, [5e-324, 5e-324], (50, 50)),
        (0, [2, 1], (0, 0)),
    ],
)
def test_known_answers(total: int, weights: list[float], counts: tuple[int, ...]) -> None:
    assert apportion(total, weights).counts == counts


@pytest.mark.parametrize(
    "weights", [[], [0.0], [0.0, 0.0], [-1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf]]
)
def test_useless_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        normalise(weights)
    with pytest.raises(ValueError, match="weight"):
        apportion(4, weights)


@settings(deadline=None)
@given(weights=WEIGHTS)
def test_normalised_weights_are_fractions_of_one(weights: list[float]) -> None:
    shares = normalise(weights)
    assert math.fsum(shares) == pytest.approx(1.0, abs=1e-12)
    assert all(0 <= share <= 1 for share in shares)


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_bounds_tile_the_batch(counts: list[int]) -> None:
    split = Split(tuple(counts))
    bounds = [split.bounds(rank) for rank in range(len(counts))]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == split.total == sum(counts)
    assert all(bounds[r][1] == bounds[r + 1][0] for r in range(len(counts) - 1))
    assert [end - start for start, end in bounds] == counts

"""Means, ratios and what may be said of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t, ttest_1samp

from hetexp.report.intervals import interval, overlap, ratio_interval
from hetexp.report.results import Interval

VALUES = st.lists(st.floats(0.1, 1e4), min_size=2, max_size=6).filter(lambda values: len(set(values)) > 1)


@given(VALUES)
def test_the_interval_is_that_of_a_t_test(values: list[float]) -> None:
    found = interval(values)
    assert found is not None
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-9)
    assert found.count == len(values)


def test_one_value_has_no_bounds_and_none_is_nothing() -> None:
    assert interval([3.0]) == Interval(3.0, None, None, 1)
    assert interval([]) is None
    assert ratio_interval([]) is None


@given(VALUES)
def test_ratios_the_other_way_round_have_the_inverse_interval(ratios: list[float]) -> None:
    one, other = ratio_interval(ratios), ratio_interval([1 / ratio for ratio in ratios])
    assert one is not None
    assert other is not None
    assert one.low is not None
    assert other.high is not None
    assert one.mean == pytest.approx(1 / other.mean)
    assert math.log(one.low) == pytest.approx(-math.log(other.high), rel=1e-9, abs=1e-9)
    assert one.low > 0


def test_ratios_by_hand() -> None:
    found = ratio_interval([1.0, 4.0])
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    half = t.ppf(0.975, 1) * math.log(4) / 2
    assert (found.low, found.high) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))


def test_overlap() -> None:
    one, other, apart = (Interval(mean, mean - 1, mean + 1, 2) for mean in (1.0, 2.5, 9.0))
    assert overlap(one, other)
    assert not overlap(one, apart)
    assert overlap(one, Interval(1.0, None, None, 1)) is None

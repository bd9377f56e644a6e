"""The running average and the detector of lasting changes, on values whose truth is known."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetexp.balancing.average import ShiftDetector, SpeedAverage

positive = st.floats(1e-3, 1e3)


@given(positive)
def test_the_first_value_counts_in_full(value: float) -> None:
    average = SpeedAverage()
    assert (average.value, average.standard_error, average.deviation(value)) == (0.0, math.inf, 0.0)
    assert average.update(value) == pytest.approx(value)
    assert average.standard_error == pytest.approx(0.05)


@given(positive, st.integers(1, 60))
def test_equal_values_are_their_own_average(value: float, count: int) -> None:
    average = SpeedAverage()
    for _ in range(count):
        average.update(value)
    assert average.value == pytest.approx(value)
    assert average.num_values == count


@given(st.lists(st.floats(0.95, 1.05), min_size=1, max_size=40), st.sampled_from([0.02, 0.1, 0.5]))
def test_it_is_the_weighted_mean_it_says(values: list[float], alpha: float) -> None:
    """Within the clip: weights alpha · (1 − alpha)^age, divided by their sum (hivemind's correction)."""
    average = SpeedAverage(alpha, assumed_spread=10.0)
    for value in values:
        average.update(value)
    weights = [alpha * (1 - alpha) ** age for age in range(len(values) - 1, -1, -1)]
    total = sum(weights)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    assert average.value == pytest.approx(mean, rel=1e-9)
    assert average.effective_values == pytest.approx(total**2 / sum(w * w for w in weights))


def test_a_single_outlier_hardly_moves_it() -> None:
    average = SpeedAverage()
    for _ in range(20):
        average.update(1.0)
    average.update(1000.0)
    assert 1.0 < average.value < 1.01
    average.update(1e-6)
    assert average.value == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("jitter", [0.02, 0.1, 0.3])
def test_it_learns_spread_and_standard_error(jitter: float) -> None:
    draw = random.Random(0)
    ends = []
    for _ in range(150):
        average = SpeedAverage(alpha=0.05)
        for _ in range(300):
            average.update(draw.uniform(1 - jitter, 1 + jitter))
        ends.append(average)
    assert statistics.mean(a.spread for a in ends) == pytest.approx(jitter / math.sqrt(3), rel=0.15)
    errors = statistics.pstdev(a.value for a in ends)
    assert statistics.mean(a.standard_error for a in ends) == pytest.approx(errors, rel=0.2)


@given(st.lists(positive, min_size=1, max_size=8))
def test_it_starts_again_with_what_it_is_given(values: list[float]) -> None:
    average = SpeedAverage()
    for _ in range(30):
        average.update(500.0)
    average.restart(values)
    assert average.num_values == len(values)
    assert min(values) * (1 - 1e-9) <= average.value <= max(values) * (1 + 1e-9)
    assert average.effective_values <= len(values) + 1e-9


def test_one_stray_value_does_not_spoil_a_new_start() -> None:
    average = SpeedAverage()
    average.restart([9.0, 2.0, 2.1])
    assert 2.0 < average.value < 2.4


@given(st.integers(0, 10), st.integers(0, 10))
def test_it_forgets_certainty_but_not_the_value(count: int, kept: int) -> None:
    average = SpeedAverage()
    for _ in range(count):
        average.update(2.0)
    value = average.value
    average.forget(kept)
    assert average.value == value
    assert average.num_values == min(count, kept)
    fresh = SpeedAverage()
    for _ in range(min(count, kept)):
        fresh.update(2.0)
    assert average.owed == pytest.approx(fresh.owed)


@given(st.lists(positive, max_size=20), st.lists(positive, min_size=1, max_size=10))
def test_it_goes_on_from_json_exactly(before: list[float], after: list[float]) -> None:
    average = SpeedAverage()
    for value in before:
        average.update(value)
    other = SpeedAverage.from_dict(json.loads(json.dumps(average.to_dict())))
    assert [average.update(v) for v in after] == [other.update(v) for v in after]
    assert average == other


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_only_positive_numbers_are_speeds(value: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        SpeedAverage().update(value)
    with pytest.raises(ValueError, match="between 0 and 1"):
        SpeedAverage(alpha=value)


# ---------------------------------------------------------------- lasting changes


@given(st.sampled_from([-3.0, 3.0]), st.lists(st.floats(-1, 1), max_size=20))
def test_three_far_values_in_a_row_are_a_change(far: float, before: list[float]) -> None:
    detector = ShiftDetector()
    assert not any(map(detector.add, before))
    assert [detector.add(far) for _ in range(3)] == [0, 0, 3]


@given(st.lists(st.sampled_from([-3.0, 3.0]), min_size=1, max_size=1), st.integers(2, 9))
def test_single_outliers_are_none(outlier: list[float], apart: int) -> None:
    detector = ShiftDetector()
    for _ in range(10):
        assert not any(map(detector.add, [*outlier, *[0.0] * apart]))


def test_a_small_change_takes_longer() -> None:
    detector = ShiftDetector()
    found = [detector.add(2.0) for _ in range(6)]
    assert found == [0, 0, 0, 0, 0, 6]
    detector.reset()
    assert not detector.num_up
    assert not any(detector.add(1.0) for _ in range(1000))


def test_noise_is_none() -> None:
    """Normal noise, limited at 3: a false alarm in about a hundred thousand."""
    draw, detector = random.Random(0), ShiftDetector()
    alarms = 0
    for _ in range(100_000):
        if detector.add(min(max(draw.gauss(0, 1), -3.0), 3.0)):
            alarms += 1
            detector.reset()
    assert alarms <= 4


def test_the_detector_goes_on_from_json() -> None:
    detector = ShiftDetector()
    detector.add(-3.0)
    other = ShiftDetector.from_dict(json.loads(json.dumps(detector.to_dict())))
    assert other == detector and other.suspects_less
    assert [other.add(-3.0), other.add(-3.0)] == [0, 3]

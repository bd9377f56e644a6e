"""A device's speed curve: what it says of a step, and back from a time to samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from speed_curves import curves

from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel, Links, step_seconds
from hetexp.data.loader import cut


def pass_of(curve: SpeedCurve, samples: int) -> float:
    """One pass, sample by sample."""
    seconds = curve.fixed_seconds
    for nth in range(1, samples + 1):
        slope = curve.seconds_per_sample
        for at, beyond in curve.kinks:
            slope = beyond if nth > at else slope
        seconds += slope
    return seconds


def test_a_straight_line() -> None:
    curve = SpeedCurve(0.5, 0.25, update_seconds=0.125)
    assert [curve.seconds(n) for n in (0, 1, 2, 8)] == [0.125, 0.875, 1.125, 2.625]
    assert [curve.compute_seconds(n) for n in (0, 1, 8)] == [0.0, 0.75, 2.5]


def test_a_kink_is_where_further_samples_begin_to_cost_more() -> None:
    curve = SpeedCurve(1.0, 1.0, kinks=((4, 2.0), (6, 0.5)))
    assert [curve.seconds(n) for n in range(9)] == [0, 2, 3, 4, 5, 7, 9, 9.5, 10]


def test_each_pass_pays_the_fixed_cost() -> None:
    curve = SpeedCurve(1.0, 0.5, update_seconds=0.25, microbatch_size=4)
    assert [curve.passes(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert [curve.seconds(n) for n in (0, 4, 5, 8, 9)] == [0.25, 3.25, 4.75, 6.25, 7.75]


@given(curves(), st.integers(0, 60))
def test_a_step_is_the_passes_that_the_loader_cuts(curve: SpeedCurve, samples: int) -> None:
    pieces = cut(samples, 1, curve.microbatch_size)
    assert curve.passes(samples) == len(pieces)
    work = sum(pass_of(curve, piece) for piece in pieces)
    assert curve.compute_seconds(samples) == pytest.approx(work, rel=1e-12)
    assert curve.seconds(samples) == pytest.approx(curve.update_seconds + work, rel=1e-12)


@given(curves(), st.integers(0, 60))
def test_level_is_the_longest_so_far(curve: SpeedCurve, samples: int) -> None:
    assert curve.level(samples) == pytest.approx(max(curve.seconds(n) for n in range(samples + 1)), rel=1e-12)


def test_an_inefficient_microbatch_is_the_exception() -> None:
    curve = SpeedCurve(0.0, 1.0, kinks=((4, 3.0),), microbatch_size=8)
    assert curve.seconds(8) == 16 and curve.seconds(9) == 11  # two passes of at most five
    assert curve.level(9) == 16


@given(curves(), st.integers(0, 400).map(lambda n: n / 16))
def test_samples_within_a_time(curve: SpeedCurve, seconds: float) -> None:
    found = curve.samples_within(seconds)
    far = 4000 if found is None else found
    assert curve.level(far) <= seconds or far == 0
    if found is None:
        assert curve.cap is None
    elif found != curve.cap:
        assert curve.level(found + 1) > seconds or curve.level(0) > seconds


def test_samples_within_has_no_limit_only_where_the_curve_is_flat() -> None:
    flat = SpeedCurve(1.0, 0.0)
    assert flat.samples_within(1.0) is None
    assert flat.samples_within(0.5) == 0
    assert replace(flat, cap=7).samples_within(1.0) == 7
    assert SpeedCurve(0.0, 1e-3).samples_within(1e9) == 10**12
    assert SpeedCurve(0.0, 1.0, update_seconds=2.0).samples_within(1.0) == 0


@given(curves(), st.integers(0, 60), st.sampled_from([0.5, 1.0, 2.0, 3.7]))
def test_a_scaled_device_takes_so_many_times_as_long(curve: SpeedCurve, samples: int, factor: float) -> None:
    assert curve.scaled(factor).seconds(samples) == pytest.approx(factor * curve.seconds(samples))
    assert curve.scaled(1.0) == curve


@given(curves(), st.integers(0, 60))
def test_it_is_what_the_cost_model_takes(curve: SpeedCurve, samples: int) -> None:
    """Without links, a step of one rank is the rank's own time."""
    work = curve.work(samples)
    assert len(work.forward) == len(work.backward) == curve.passes(samples)
    alone = Links(device=(Channel(),), exchange=(Channel(),))
    assert step_seconds([work], alone, [(1.0, 8.0)]) == pytest.approx(curve.seconds(samples))


@given(curves(), st.floats(1e-9, 1e9))
def test_json_holds_a_curve_to_the_last_bit(curve: SpeedCurve, factor: float) -> None:
    curve = curve.scaled(factor / 3)
    assert SpeedCurve.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve


def test_a_stored_curve_must_be_one() -> None:
    stored = SpeedCurve(1.0, 2.0).to_dict()
    with pytest.raises(ValueError, match="'cap'.*not.*'cup'"):
        SpeedCurve.from_dict({**{k: v for k, v in stored.items() if k != "cap"}, "cup": None})
    with pytest.raises(ValueError, match="not negative"):
        SpeedCurve.from_dict({**stored, "fixed_seconds": -1.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"fixed_seconds": -0.1},
        {"fixed_seconds": math.nan},
        {"seconds_per_sample": math.inf},
        {"update_seconds": -1.0},
        {"fixed_seconds": 0.0, "seconds_per_sample": 0.0},
        {"kinks": ((4, 1.0), (4, 2.0))},
        {"kinks": ((8, 1.0), (4, 2.0))},
        {"kinks": ((0, 1.0),)},
        {"kinks": ((4, -1.0),)},
        {"microbatch_size": 0},
        {"cap": -1},
    ],
)
def test_what_no_device_does_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"SpeedCurve\("):
        SpeedCurve(**{"fixed_seconds": 1.0, "seconds_per_sample": 1.0, **wrong})


# ---------------------------------------------------------------- through measured points


@given(curves(), st.sets(st.integers(1, 50), min_size=2, max_size=7))
def test_points_of_a_curve_are_met(curve: SpeedCurve, sizes: set[int]) -> None:
    points = [(size, curve.pass_seconds(size)) for size in sorted(sizes)]
    assume(points[0][1] > 0)
    joined = SpeedCurve.through(points, update_seconds=0.5, cap=9)
    assert (joined.update_seconds, joined.cap) == (0.5, 9)
    for size, seconds in points:
        assert joined.pass_seconds(size) == pytest.approx(seconds)
    for (a, ta), (b, tb) in zip(points, points[1:], strict=False):
        assert joined.pass_seconds((a + b) / 2) == pytest.approx((ta + tb) / 2)


def test_a_line_through_points_goes_on() -> None:
    curve = SpeedCurve.through([(2, 3.0), (4, 4.0), (8, 8.0)])
    assert curve == SpeedCurve(2.0, 0.5, kinks=((4, 1.0),))
    assert curve.pass_seconds(1) == 2.5 and curve.pass_seconds(10) == 10.0


def test_nothing_takes_less_than_no_time() -> None:
    curve = SpeedCurve.through([(4, 1.0), (8, 5.0)])  # the line would cross zero at 3
    assert curve.fixed_seconds == 0.0
    assert [curve.pass_seconds(n) for n in (2, 4, 6, 8)] == [0.5, 1.0, 3.0, 5.0]


def test_noise_that_makes_more_samples_quicker_is_averaged() -> None:
    curve = SpeedCurve.through([(1, 1.0), (2, 2.0), (3, 1.5), (4, 1.6), (5, 4.0)])
    assert [curve.pass_seconds(n) for n in range(1, 6)] == pytest.approx([1.0, 1.7, 1.7, 1.7, 4.0])


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_any_points_make_a_rising_curve(seconds: list[float]) -> None:
    curve = SpeedCurve.through(list(enumerate(seconds, start=1)))
    joined = [curve.pass_seconds(n) for n in range(1, len(seconds) + 3)]
    assert all(b >= a - 1e-9 for a, b in zip(joined, joined[1:], strict=False))
    assert min(seconds) - 1e-9 <= joined[0] and joined[len(seconds) - 1] <= max(seconds) + 1e-9


@pytest.mark.parametrize(
    "points", [[], [(1, 1.0)], [(2, 1.0), (2, 1.0)], [(4, 1.0), (2, 2.0)], [(0, 1.0), (2, 2.0)]]
)
def test_points_must_tell_sizes_apart(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="two points"):
        SpeedCurve.through(points)

"""The solver against brute force, against an integer program, and against what must hold of any answer."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from speed_curves import curves, seconds

from hetexp.balancing.solver import ceiling, solve, step_times
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.split import Split

PROFILE = settings(deadline=None, max_examples=200)


def splits(total: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to split a batch."""
    if ranks == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in splits(total - first, ranks - 1):
            yield first, *rest


def sorted_times(devices: Sequence[SpeedCurve], counts: Sequence[int], tails: Sequence[float]) -> list[float]:
    """The ranks' times from the longest, rounded so that equal ones are equal."""
    times = (c.level(n) + tail for c, n, tail in zip(devices, counts, tails, strict=True))
    return sorted((round(t, 7) for t in times), reverse=True)


def allowed(
    devices: Sequence[SpeedCurve], counts: Sequence[int], least: Sequence[int], caps: Sequence[int | None]
) -> bool:
    limits = zip(devices, counts, least, caps, strict=True)
    return all(
        low <= n <= min(m for m in (n, curve.cap, cap) if m is not None) for curve, n, low, cap in limits
    )


few = st.lists(curves(), min_size=1, max_size=4)
limited = few.flatmap(
    lambda devices: st.tuples(
        st.just(devices),
        st.integers(0, 10),
        st.lists(st.integers(0, 2), min_size=len(devices), max_size=len(devices)),
        st.lists(st.none() | st.integers(0, 8), min_size=len(devices), max_size=len(devices)),
        st.lists(seconds, min_size=len(devices), max_size=len(devices)),
    )
)


@PROFILE
@given(limited)
def test_no_split_is_faster(
    case: tuple[list[SpeedCurve], int, list[int], list[int | None], list[float]],
) -> None:
    """Every possible split is looked at; if there is none, the solver says so."""
    devices, total, least, caps, tails = case
    possible = [s for s in splits(total, len(devices)) if allowed(devices, s, least, caps)]
    if not possible:
        with pytest.raises(ValueError, match=r"minimum shares|no place"):
            solve(devices, total, least, caps, tails)
        return
    found = solve(devices, total, least, caps, tails)
    assert found.counts in possible
    best = min(sorted_times(devices, s, tails)[0] for s in possible)
    assert sorted_times(devices, found.counts, tails)[0] == pytest.approx(best, abs=1e-6)


def rises(curve: SpeedCurve) -> bool:
    steps = [curve.seconds(n) for n in range(12)]
    return all(b > a for a, b in zip(steps, steps[1:], strict=False))


@PROFILE
@given(limited)
def test_nobody_works_longer_than_needed(
    case: tuple[list[SpeedCurve], int, list[int], list[int | None], list[float]],
) -> None:
    """Of the fastest splits, the sorted times are the smallest, the longest first."""
    devices, total, least, caps, tails = case
    assume(all(map(rises, devices)))
    possible = [s for s in splits(total, len(devices)) if allowed(devices, s, least, caps)]
    assume(possible)
    best = min(sorted_times(devices, s, tails) for s in possible)
    assert sorted_times(devices, solve(devices, total, least, caps, tails).counts, tails) == best


@PROFILE
@given(few, st.integers(0, 300))
def test_the_parts_sum_to_the_whole(devices: list[SpeedCurve], total: int) -> None:
    devices = [replace(curve, cap=None) for curve in devices]
    split = solve(devices, total)
    assert split.total == total and min(split.counts) >= 0
    # A certificate that needs no other split: within less than the level nobody finds room for all.
    level = max(c.level(n) for c, n in zip(devices, split.counts, strict=True) if n or total == 0)
    within = [curve.samples_within(level * (1 - 1e-6)) for curve in devices]
    if total and None not in within:
        assert sum(n for n in within if n is not None) < total


@pytest.mark.parametrize("seed", range(6))
def test_against_an_integer_program(seed: int) -> None:
    """Straight curves with fixed costs and caps: HiGHS finds no shorter step."""
    draw = random.Random(seed)
    ranks, total = 12, draw.randint(100, 400)
    devices = [
        SpeedCurve(
            draw.uniform(0, 2), 10 ** draw.uniform(-2, 0), update_seconds=draw.uniform(0, 0.3), cap=total // 5
        )
        for _ in range(ranks)
    ]
    # Variables: samples of each rank, whether it works, and the step time.
    slopes = np.diag([c.seconds_per_sample for c in devices])
    fixed = np.diag([c.fixed_seconds for c in devices])
    late = LinearConstraint(
        np.hstack([slopes, fixed, -np.ones((ranks, 1))]), -np.inf, [-c.update_seconds for c in devices]
    )
    works = LinearConstraint(
        np.hstack([np.eye(ranks), -np.eye(ranks) * (total // 5), np.zeros((ranks, 1))]), -np.inf, 0
    )
    whole = LinearConstraint(np.array([[1.0] * ranks + [0.0] * (ranks + 1)]), total, total)
    program = milp(
        np.array([0.0] * (2 * ranks) + [1.0]),
        constraints=[late, works, whole],
        integrality=np.array([1] * (2 * ranks) + [0]),
        bounds=Bounds(0, np.array([total] * ranks + [1] * ranks + [np.inf])),
        options={"mip_rel_gap": 1e-9},
    )
    assert program.success
    assert max(step_times(devices, solve(devices, total))) == pytest.approx(program.fun, rel=1e-6)


def test_ten_thousand_devices() -> None:
    """The certificate again, at the size of simulations; `benchmarks/bench_solver.py` measures its time."""
    draw = random.Random(1)
    devices = [
        SpeedCurve(
            draw.uniform(0, 0.01), 10 ** draw.uniform(-4, -1), microbatch_size=draw.choice((None, 8, 32))
        )
        for _ in range(10_000)
    ]
    split = solve(devices, 1_000_000)
    assert split.total == 1_000_000
    level = max(step_times(devices, split))
    assert sum(curve.samples_within(level * (1 - 1e-9)) or 0 for curve in devices) < 1_000_000


# ---------------------------------------------------------------- ties and noise


@given(st.integers(1, 9), st.integers(0, 100))
def test_of_equal_devices_the_lower_rank_takes_more(ranks: int, total: int) -> None:
    split = solve([SpeedCurve(0.1, 0.3)] * ranks, total)
    few, more = divmod(total, ranks)
    assert split.counts == (few + 1,) * more + (few,) * (ranks - more)


def test_the_odd_sample_goes_to_whom_it_keeps_busy_for_the_shortest() -> None:
    """Both could end at 6 with the last sample: one works 2 for it, the other 1."""
    assert solve([SpeedCurve(0.0, 2.0), SpeedCurve(0.0, 1.0)], 8).counts == (2, 6)


@PROFILE
@given(few, st.integers(0, 40), st.randoms(use_true_random=False))
def test_rounding_errors_do_not_decide(devices: list[SpeedCurve], total: int, draw: random.Random) -> None:
    devices = [replace(curve, cap=None) for curve in devices]

    def shaken(value: float) -> float:
        return value * (1 + draw.uniform(-1e-14, 1e-14))

    noisy = [
        replace(
            curve,
            fixed_seconds=shaken(curve.fixed_seconds),
            seconds_per_sample=shaken(curve.seconds_per_sample),
            kinks=tuple((at, shaken(slope)) for at, slope in curve.kinks),
            update_seconds=shaken(curve.update_seconds),
        )
        for curve in devices
    ]
    assert solve(noisy, total) == solve(devices, total)


@PROFILE
@given(few, st.integers(0, 40), st.sampled_from([1 / 3, 1e-6, 7.7e5]))
def test_the_unit_of_time_does_not_decide(devices: list[SpeedCurve], total: int, factor: float) -> None:
    devices = [replace(curve, cap=None) for curve in devices]
    assert solve([curve.scaled(factor) for curve in devices], total) == solve(devices, total)


@PROFILE
@given(few, st.integers(0, 40), st.randoms(use_true_random=False))
def test_the_order_of_devices_does_not_change_the_times(
    devices: list[SpeedCurve], total: int, draw: random.Random
) -> None:
    devices = [replace(curve, cap=None) for curve in devices if rises(replace(curve, cap=None))]
    assume(devices)
    shuffled = draw.sample(devices, len(devices))
    none = [0.0] * len(devices)
    one = sorted_times(devices, solve(devices, total).counts, none)
    assert one == sorted_times(shuffled, solve(shuffled, total).counts, none)


# ---------------------------------------------------------------- limits


def test_a_device_that_would_be_late_with_one_sample_gets_none() -> None:
    fast, slow = SpeedCurve(0.0, 0.01), SpeedCurve(1.0, 0.01)
    assert solve([fast, slow], 64).counts == (64, 0)
    assert solve([fast, slow], 256).counts[1] > 0
    assert solve([fast, slow], 64, minimum=[0, 5]).counts == (59, 5)


def test_time_after_the_work_counts_where_it_is_not_the_same_for_all() -> None:
    device = SpeedCurve(0.0, 1.0)
    assert solve([device] * 2, 10, communication=3.0).counts == (5, 5)
    assert solve([device] * 2, 10, communication=[4.0, 0.0]).counts == (3, 7)
    assert step_times([device] * 2, Split((3, 7)), [4.0, 0.0]) == (7.0, 7.0)
    with pytest.raises(ValueError, match="2, one a rank, not 3"):
        solve([device] * 2, 10, communication=[1.0] * 3)


def test_accumulation_is_paid_by_the_pass() -> None:
    """A second pass costs the small card 10 s more: it stops at one, and the other takes the rest."""
    small, large = SpeedCurve(10.0, 1.0, microbatch_size=8), SpeedCurve(1.0, 1.0)
    assert solve([small, large], 30).counts == (8, 22)


def test_what_finds_no_place_is_told() -> None:
    devices = [SpeedCurve(0.0, 1.0, cap=64), SpeedCurve(0.0, 1.0)]
    with pytest.raises(
        ValueError, match=r"batch of 128 samples.*32 find no place.*at most 96.*rank 0 64, rank 1 32"
    ):
        solve(devices, 128, caps=[None, 32])
    with pytest.raises(ValueError, match=r"rank 1 40 of at most 32"):
        solve(devices, 90, minimum=[0, 40], caps=[None, 32])
    with pytest.raises(ValueError, match=r"batch of 10 samples.*sum to 12"):
        solve(devices, 10, minimum=[6, 6])
    with pytest.raises(ValueError, match="and 90 more"):
        solve([SpeedCurve(0.0, 1.0, cap=1)] * 100, 101)
    for wrong in ([0], [-1, 0]):
        with pytest.raises(ValueError, match="minimum shares must be 2 numbers"):
            solve(devices, 4, minimum=wrong)
        with pytest.raises(ValueError, match="caps must be 2 numbers"):
            solve(devices, 4, caps=wrong)
    with pytest.raises(ValueError, match="0 devices"):
        solve([], 4)


def test_nothing_to_do() -> None:
    assert solve([SpeedCurve(1.0, 1.0, cap=0)] * 3, 0).counts == (0, 0, 0)
    assert solve([SpeedCurve(1.0, 1.0)] * 2, 5, minimum=[2, 3]).counts == (2, 3)


# ---------------------------------------------------------------- ceiling


@given(st.integers(1, 8), st.floats(0, 0.9))
def test_fixed_costs_of_equal_cards(ranks: int, share: float) -> None:
    total = 40 * ranks
    card = SpeedCurve(share * total, 1 - share)
    found = ceiling([card] * ranks, total)
    assert found.efficiency == pytest.approx(1 / (1 + (ranks - 1) * share))
    assert found.rounding == pytest.approx(0, abs=1e-9)
    assert found.split.counts == (40,) * ranks


def test_rounding_at_batch_32_on_ten_to_four_to_one() -> None:
    found = ceiling([SpeedCurve(0.0, 1 / rate) for rate in (10, 4, 1)], 32)
    assert found.split.counts == (22, 8, 2)
    assert found.efficiency == pytest.approx(0.970, abs=5e-4)
    assert found.rounding == pytest.approx(0.030, abs=5e-4)
    assert found.fixed == pytest.approx(0, abs=1e-9)
    assert found.solo_samples_per_second == pytest.approx((10, 4, 1))


def test_a_ceiling_by_hand() -> None:
    """165:61 without other costs is 1.37 times the faster card."""
    found = ceiling([SpeedCurve(0.0, 1 / 165), SpeedCurve(0.0, 1 / 61)], 226)
    assert found.efficiency == pytest.approx(1.0)
    assert 226 / found.step_seconds / 165 == pytest.approx(1.37, abs=1e-3)
    tails = ceiling([SpeedCurve(0.0, 1 / 165), SpeedCurve(0.0, 1 / 61)], 226, communication=0.25)
    assert (tails.efficiency, tails.communication) == pytest.approx((0.8, 0.2))


@PROFILE
@given(few, st.integers(1, 9), seconds)
def test_no_split_beats_the_ceiling(devices: list[SpeedCurve], total: int, tail: float) -> None:
    devices = [replace(curve, cap=None) for curve in devices]
    assume(all(curve.seconds(total) > 0 for curve in devices))
    found = ceiling(devices, total, communication=tail)
    of_parts = sum(total / curve.seconds(total) for curve in devices)
    assert found.efficiency + found.fixed + found.rounding + found.communication == pytest.approx(1)
    if all(map(rises, devices)):
        assert found.rounding >= -1e-9
        for counts in splits(total, len(devices)):
            seconds = max(step_times(devices, Split(counts), tail))
            assert total / seconds / of_parts <= found.efficiency * (1 + 1e-6)


def test_a_device_that_may_take_nothing_adds_nothing_to_the_sum() -> None:
    found = ceiling([SpeedCurve(0.0, 1.0), SpeedCurve(0.0, 1.0, cap=0)], 8)
    assert found.solo_samples_per_second == (1.0, 0.0)
    assert found.efficiency == 1.0
    with pytest.raises(ValueError, match="one sample or more"):
        ceiling([SpeedCurve(0.0, 1.0)], 0)


def test_smaller_passes_may_be_cheaper() -> None:
    """Beyond its kink a card alone is slow; together they stay below it."""
    found = ceiling([SpeedCurve(0.0, 1.0, kinks=((8, 3.0),))] * 2, 16)
    assert found.efficiency == pytest.approx(2.0)
    assert found.fixed == pytest.approx(-1.0)


def test_every_split_is_looked_at() -> None:
    assert len(list(splits(5, 3))) == math.comb(7, 2)
    assert set(splits(3, 2)) == set(filter(lambda s: sum(s) == 3, itertools.product(range(4), repeat=2)))

"""Splits that mind power, against every possible one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speed_curves import curves

from hetexp.balancing.energy import EXACT_DEVICES, solve_for_energy, solve_within_watts
from hetexp.balancing.solver import solve, step_times
from hetexp.core.cost.speed import SpeedCurve

PROFILE = settings(deadline=None, max_examples=100)
SLACK = 1 + 1e-6


def splits(total: int, ranks: int) -> Iterator[tuple[int, ...]]:
    if ranks == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in splits(total - first, ranks - 1):
            yield first, *rest


def level(devices: Sequence[SpeedCurve], counts: Sequence[int]) -> float:
    return max(curve.level(n) for curve, n in zip(devices, counts, strict=True))


devices_and_numbers = st.lists(st.tuples(curves(), st.integers(0, 6)), min_size=1, max_size=4).map(
    lambda rows: ([replace(curve, cap=None) for curve, _ in rows], [float(n) for _, n in rows])
)


@PROFILE
@given(devices_and_numbers, st.integers(0, 9), st.integers(0, 20))
def test_no_split_within_the_budget_is_faster(
    case: tuple[list[SpeedCurve], list[float]], total: int, budget: int
) -> None:
    devices, watts = case

    def draws(counts: Sequence[int]) -> float:
        return sum(w for w, n in zip(watts, counts, strict=True) if n)

    possible = [s for s in splits(total, len(devices)) if draws(s) <= budget]
    if not possible:
        with pytest.raises(ValueError, match=rf"budget of {budget} W .*the devices draw"):
            solve_within_watts(devices, total, watts, budget)
        return
    found = solve_within_watts(devices, total, watts, budget).counts
    assert found in possible
    assert level(devices, found) <= min(level(devices, s) for s in possible) * SLACK


@PROFILE
@given(devices_and_numbers, st.integers(0, 9), st.sampled_from([0.0, 0.1, 0.5, 4.0]))
def test_no_split_within_the_tolerance_needs_less(
    case: tuple[list[SpeedCurve], list[float]], total: int, tolerance: float
) -> None:
    devices, joules = case

    def needs(counts: Sequence[int]) -> float:
        return sum(j * n for j, n in zip(joules, counts, strict=True))

    fastest = max(step_times(devices, solve(devices, total)))
    found = solve_for_energy(devices, total, joules, tolerance).counts
    limit = max(fastest * (1 + tolerance), level(devices, [0] * len(devices)))
    assert sum(found) == total
    assert level(devices, found) <= limit * SLACK
    possible = [s for s in splits(total, len(devices)) if level(devices, s) <= limit * (1 - 1e-6)]
    assert needs(found) <= min((needs(s) for s in possible), default=1e9)


def test_a_budget_by_hand() -> None:
    """Alone the large card fits the budget; the two small ones together are faster."""
    large, small = SpeedCurve(0.0, 1.0), SpeedCurve(0.0, 1.5)
    devices, watts = [large, small, small], [300.0, 150.0, 150.0]
    assert solve_within_watts(devices, 30, watts, 300).counts == (0, 15, 15)
    assert solve_within_watts(devices, 30, watts, 450).counts == (18, 12, 0)
    assert solve_within_watts(devices, 30, watts, 1e9) == solve(devices, 30)
    assert solve_within_watts(devices, 30, watts, 300, minimum=[1, 0, 0]).counts == (30, 0, 0)
    assert solve_within_watts(devices, 30, watts, 450, [1, 0, 0], [8, None, None]).counts == (8, 22, 0)


def test_of_equally_fast_sets_the_one_that_draws_less() -> None:
    twin = SpeedCurve(0.0, 1.0)
    assert solve_within_watts([twin] * 3, 12, [200.0, 150.0, 150.0], 350).counts == (0, 6, 6)


def test_many_devices_keep_to_the_budget_too() -> None:
    draw = random.Random(2)
    ranks = 3 * EXACT_DEVICES
    devices = [SpeedCurve(draw.uniform(0, 0.1), draw.uniform(0.01, 0.1)) for _ in range(ranks)]
    watts = [draw.uniform(50, 450) for _ in range(ranks)]
    found = solve_within_watts(devices, 2000, watts, 4000)
    assert found.total == 2000
    assert sum(w for w, n in zip(watts, found.counts, strict=True) if n) <= 4000
    # A device more than fits, of average worth, could not have made it much faster.
    loose = solve_within_watts(devices, 2000, watts, 4450)
    assert max(step_times(devices, found)) < 1.2 * max(step_times(devices, loose))
    with pytest.raises(ValueError, match="budget of 10 W"):
        solve_within_watts(devices, 2000, watts, 10)


def test_thrift_by_hand() -> None:
    """Fastest is 20/20 in 20 s. Within half as much again the thrifty card does 30 of the 40."""
    card = SpeedCurve(0.0, 1.0)
    assert solve_for_energy([card, card], 40, [2.0, 1.0], tolerance=0.5).counts == (10, 30)
    assert solve_for_energy([card, card], 40, [2.0, 1.0], tolerance=0.0).counts == (20, 20)
    assert solve_for_energy([card, card], 40, [1.0, 1.0], tolerance=0.5).counts == (20, 20)
    assert solve_for_energy([card, card], 40, [2.0, 1.0], 0.5, minimum=[15, 0]).counts == (15, 25)


def test_wrong_figures_are_told() -> None:
    card = SpeedCurve(0.0, 1.0)
    for wrong in ([1.0], [1.0, -1.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="watts must be 2"):
            solve_within_watts([card] * 2, 4, wrong, 100)
        with pytest.raises(ValueError, match="joules per sample must be 2"):
            solve_for_energy([card] * 2, 4, wrong)
    with pytest.raises(ValueError, match="tolerance"):
        solve_for_energy([card] * 2, 4, [1.0, 1.0], tolerance=-0.1)

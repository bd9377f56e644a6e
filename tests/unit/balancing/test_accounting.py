"""Where the speed went: the losses and the efficiency are the whole, whatever happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetexp.balancing.accounting import account
from hetexp.balancing.solver import solve
from hetexp.core.cost.speed import SpeedCurve

CURVES = st.lists(st.builds(SpeedCurve, st.floats(0.0, 0.1), st.floats(1e-4, 0.1)), min_size=1, max_size=4)


@given(CURVES, st.integers(4, 64), st.floats(1.0, 3.0), st.floats(0.0, 0.5))
def test_the_parts_are_the_whole(curves: list[SpeedCurve], total: int, slower: float, data: float) -> None:
    split = solve(curves, total)
    predicted = max(c.seconds(n) for c, n in zip(curves, split.counts, strict=True)) * 1.1
    measured = predicted * slower
    found = account(curves, split.counts, predicted, predicted, measured, data * measured)
    assert sum(found.lost_to.values()) == pytest.approx(1 - found.efficiency)
    assert found.lost_to["imbalance"] == pytest.approx(0.0, abs=1e-9)
    assert found.lost_to["communication"] >= 0
    assert found.lost_to["rounding"] >= -1e-9
    assert found.efficiency <= found.ceiling + 1e-9


def test_by_hand() -> None:
    # 3:1 without fixed costs: 64 samples, 48 and 16, both in 0.48 s.
    curves = [SpeedCurve(0.0, 0.01), SpeedCurve(0.0, 0.03)]
    found = account(curves, (32, 32), 0.96, 0.5, 1.2, 0.12)
    assert found.solo_samples_per_second == pytest.approx((100.0, 100 / 3))
    assert found.ceiling == pytest.approx(0.48 / 0.5)
    assert found.efficiency == pytest.approx(0.4)
    assert found.lost_to["imbalance"] == pytest.approx(0.5)  # 0.96 s instead of 0.48
    assert found.lost_to["communication"] == pytest.approx(0.0)
    assert found.lost_to["rounding"] == pytest.approx(0.0)
    assert found.lost_to["data"] == pytest.approx(0.04)  # a tenth of the step
    assert found.lost_to["other"] == pytest.approx(0.06)

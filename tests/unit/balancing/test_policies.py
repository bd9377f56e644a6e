"""Policies: fractions of one, in the order of the devices, or a sentence that says why not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.balancing.equal import Equal
from hetexp.balancing.manual import Manual
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import check_component


def devices(count: int) -> list[DeviceSpec]:
    return [DeviceSpec(id=f"cpu:{i}", backend="cpu", index=i, name="CPU", vendor="cpu") for i in range(count)]


@settings(deadline=None)
@given(count=st.integers(1, 64))
def test_equal_shares_are_equal(count: int) -> None:
    shares = Equal().shares(devices(count))
    assert len(shares) == count
    assert len(set(shares)) == 1
    assert math.fsum(shares) == pytest.approx(1.0)


@settings(deadline=None)
@given(weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=16).filter(any))
def test_manual_shares_are_the_weights_parts_of_their_sum(weights: list[float]) -> None:
    shares = Manual(weights).shares(devices(len(weights)))
    assert math.fsum(shares) == pytest.approx(1.0)
    whole = math.fsum(weights)
    assert shares == pytest.approx([weight / whole for weight in weights])
    assert all(
        (share == 0) == (weight / max(weights) == 0) for share, weight in zip(shares, weights, strict=True)
    )


@settings(deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=6), data=st.data())
def test_manual_shares_follow_the_order_of_the_devices(weights: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(weights))))
    straight = Manual(weights).shares(devices(len(weights)))
    permuted = Manual([weights[i] for i in order]).shares(devices(len(weights)))
    assert list(permuted) == [straight[i] for i in order]


@pytest.mark.parametrize(("weights", "count"), [([1.0], 2), ([1.0, 2.0, 3.0], 2), ([], 1)])
def test_a_wrong_number_of_weights_names_the_devices(weights: list[float], count: int) -> None:
    with pytest.raises(ConfigError) as refused:
        Manual(weights or [1.0, 1.0]).shares(devices(count))
    (problem,) = refused.value.problems
    assert problem.startswith(f"`balancing.weights` must be {count} number")
    for device in devices(count):
        assert device.id in problem
    assert str(weights or [1.0, 1.0]) in problem


@pytest.mark.parametrize(
    "weights", [[], [0], [0.0, 0.0], [1, -1], [1, "2"], [1, True], 3, None, [1, math.inf]]
)
def test_useless_weights_are_told_before_anything_is_built(weights: object) -> None:
    node = {"_target_": "hetexp.balancing.manual.Manual", "weights": weights}
    found = check_component("balancing", node)
    if not found:  # what one element does not show, the constructor tells
        with pytest.raises(ConfigError) as refused:
            Manual(weights)  # type: ignore[arg-type]
        found = refused.value.problems
    assert len(found) == 1
    assert found[0].startswith("`balancing.weights")
    assert " must be " in found[0]


def test_one_device_takes_all() -> None:
    assert Equal().shares(devices(1)) == (1.0,)
    assert Manual([0.3]).shares(devices(1)) == (1.0,)


def test_a_weight_of_zero_is_a_share_of_zero() -> None:
    assert Manual([2, 0]).shares(devices(2)) == (1.0, 0.0)

"""Policies: fractions of one, in the order of the devices, or a sentence that says why not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.balancing.adaptive import Adaptive
from hetexp.balancing.equal import Equal
from hetexp.balancing.manual import Manual
from hetexp.balancing.profiled import Profiled
from hetexp.balancing.scheduler import SchedulerSettings
from hetexp.balancing.tflops import Tflops
from hetexp.balancing.vram import Vram, usable_bytes
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import check_component

FLOAT32 = ("float32", "float32")


def devices(count: int) -> list[DeviceSpec]:
    return [DeviceSpec(id=f"cpu:{i}", backend="cpu", index=i, name="CPU", vendor="cpu") for i in range(count)]


@settings(deadline=None)
@given(count=st.integers(1, 64))
def test_equal_shares_are_equal(count: int) -> None:
    shares = Equal().shares(devices(count), FLOAT32)
    assert len(shares) == count
    assert len(set(shares)) == 1
    assert math.fsum(shares) == pytest.approx(1.0)


@settings(deadline=None)
@given(weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=16).filter(any))
def test_manual_shares_are_the_weights_parts_of_their_sum(weights: list[float]) -> None:
    shares = Manual(weights).shares(devices(len(weights)), FLOAT32)
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
    straight = Manual(weights).shares(devices(len(weights)), FLOAT32)
    permuted = Manual([weights[i] for i in order]).shares(devices(len(weights)), FLOAT32)
    assert list(permuted) == [straight[i] for i in order]


@pytest.mark.parametrize(("weights", "count"), [([1.0], 2), ([1.0, 2.0, 3.0], 2), ([], 1)])
def test_a_wrong_number_of_weights_names_the_devices(weights: list[float], count: int) -> None:
    with pytest.raises(ConfigError) as refused:
        Manual(weights or [1.0, 1.0]).shares(devices(count), FLOAT32)
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
    assert Equal().shares(devices(1), FLOAT32) == (1.0,)
    assert Manual([0.3]).shares(devices(1), FLOAT32) == (1.0,)


def test_a_weight_of_zero_is_a_share_of_zero() -> None:
    assert Manual([2, 0]).shares(devices(2), FLOAT32) == (1.0, 0.0)


# ---------------------------------------------------------------- by data sheet and by memory


def card(index: int, vendor: str = "nvidia", **facts: Any) -> DeviceSpec:
    return DeviceSpec(f"cuda:{index}", "cuda", index, f"Card {index}", vendor, **facts)


def test_tflops_are_the_catalogues_in_each_devices_precision() -> None:
    fast = card(0, rates={"float32": 30.0, "bfloat16": 120.0})
    slow = card(1, rates={"float32": 10.0})
    assert Tflops().shares([fast, slow], ["float32", "float32"]) == (0.75, 0.25)
    assert Tflops().shares([fast, slow], ["bfloat16", "float32"]) == pytest.approx((12 / 13, 1 / 13))
    with pytest.raises(ConfigError, match=r"does not know cuda:1 \(Card 1\).*balancing=profiled"):
        Tflops().shares([fast, card(1)], ["float32", "float32"])
    with pytest.raises(ConfigError, match="does not know cuda:1"):
        Tflops().shares([fast, slow], ["bfloat16", "bfloat16"])


def test_vram_is_memory_times_the_vendors_factor() -> None:
    both = [card(0, memory_bytes=24 * GIB), card(1, "amd", memory_bytes=24 * GIB)]
    assert Vram().shares(both, FLOAT32) == pytest.approx((1 / 1.8, 0.8 / 1.8))
    intel = card(2, "intel", memory_bytes=16 * GIB)
    assert Vram().shares([both[0], intel], FLOAT32) == pytest.approx((24 / 32, 8 / 32))


def test_vram_follows_what_is_free_by_device_and_not_by_position() -> None:
    full = card(0, memory_bytes=24 * GIB, memory_free_bytes=4 * GIB)
    empty = card(2, memory_bytes=12 * GIB, memory_free_bytes=int(11.5 * GIB))
    for order in ([full, empty], [empty, full]):
        shares = dict(zip([d.id for d in order], Vram().shares(order, FLOAT32), strict=True))
        assert shares["cuda:0"] == pytest.approx(1.6 / (1.6 + 10.3))  # a tenth of each is kept back
        assert shares["cuda:2"] == pytest.approx(10.3 / (1.6 + 10.3))


def test_memory_shared_with_the_host_counts_in_part() -> None:
    unified = card(0, memory_bytes=96 * GIB, unified_memory=True)
    assert usable_bytes(unified) == 48 * GIB - int(4.8 * GIB)


@pytest.mark.parametrize(
    "facts", [{}, {"memory_bytes": 0}, {"memory_bytes": 8 * GIB, "memory_free_bytes": 0}]
)
def test_no_memory_is_asked_for_and_never_a_silent_zero(facts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"nothing is free or known on cuda:1 \(Card 1\).*memory_gib"):
        Vram().shares([card(0, memory_bytes=GIB), card(1, **facts)], FLOAT32)


def test_profiled_starts_from_the_catalogue_where_that_knows_all() -> None:
    fast, slow = card(0, rates={"float32": 30.0}), card(1, rates={"float32": 10.0})
    assert Profiled().measures
    assert Profiled().shares([fast, slow], ["float32"] * 2) == (0.75, 0.25)
    assert Profiled().shares([fast, card(1)], ["float32"] * 2) == (0.5, 0.5)


def test_adaptive_starts_where_profiled_does_and_follows() -> None:
    fast, slow = card(0, rates={"float32": 30.0}), card(1, rates={"float32": 10.0})
    policy = Adaptive(min_gain=0.05, max_move=0.5, probe_every=7)
    assert policy.follows and not policy.measures
    assert policy.shares([fast, slow], ["float32"] * 2) == (0.75, 0.25)
    assert policy.shares([fast, card(1)], ["float32"] * 2) == (0.5, 0.5)
    assert policy.settings == SchedulerSettings(min_gain=0.05, max_move=0.5, probe_every=7)
    assert Adaptive(calibrate=True).measures
    assert not Profiled().follows

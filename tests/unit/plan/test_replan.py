"""What is left of a plan without some of its devices: one global batch, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import plan_on, unbuilt_config

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.core.topology import Group, Topology
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.plan.replan import extended, replan
from hetexp.plan.routes import routed

CPU = [CpuBackend.describe(i) for i in range(4)]
CONFIG = unbuilt_config(trainer={"global_batch_size": 100})


def plan(*shares: float, **changes: Any) -> Plan:
    count = len(shares)
    made = plan_on(CPU[:count], CONFIG, shares=shares, threads=tuple(range(1, count + 1)), **changes)
    local = apportion(100, shares).counts
    return routed(replace(made, local_batch_sizes=local, route=Topology(), precisions=("float32",) * count))


def test_without_one_of_three() -> None:
    whole = plan(0.5, 0.3, 0.2)
    left = replan(whole, [0, 2])
    assert [device.id for device in left.devices] == ["cpu:0", "cpu:2"]
    assert left.shares == pytest.approx((5 / 7, 2 / 7))
    assert left.local_batch_sizes == (71, 29)
    assert left.threads == (1, 3)
    assert left.route == Topology(((Group("shm", (0, 1)),),))
    assert left.reasons[0].startswith("Without cpu:1: cpu:0 71, cpu:2 29 of the 100 samples of a step.")
    assert replan(whole, [0, 1, 2]) is whole


def test_devices_that_had_nothing_to_do_share_the_batch_evenly() -> None:
    assert replan(plan(1.0, 0.0, 0.0), [1, 2]).local_batch_sizes == (50, 50)


@given(st.lists(st.integers(0, 10), min_size=2, max_size=4), st.data())
def test_any_devices_take_the_whole_batch(weights: list[int], data: st.DataObject) -> None:
    total = sum(weights)
    shares = [weight / total if total else 1 / len(weights) for weight in weights]
    places = sorted(data.draw(st.sets(st.sampled_from(range(len(weights))), min_size=1)))
    left = replan(plan(*shares), places)
    assert sum(left.local_batch_sizes) == 100
    assert sum(left.shares) == pytest.approx(1)
    assert left.world_size == len(left.threads) == len(left.precisions) == len(places)


def test_a_larger_part_goes_in_several_passes_where_memory_is_short() -> None:
    devices = [replace(device, memory_bytes=1000) for device in CPU[:3]]
    whole = replace(plan(0.4, 0.4, 0.2), devices=tuple(devices), memory_bytes=(800, 100, None))
    left = replan(whole, [0, 1])
    assert left.local_batch_sizes == (50, 50)
    assert left.microbatch_sizes == (45, None)  # 40 samples × 900/800 bytes
    assert left.memory_bytes == (800, 100)
    small = replan(replace(whole, microbatch_sizes=(10, None, None)), [0, 1])
    assert small.microbatch_sizes == (10, None)  # what it had is known to fit


def test_measured_devices_get_the_split_that_ends_a_step_soonest() -> None:
    curves = [SpeedCurve(0.0, seconds) for seconds in (1e-3, 2e-3, 4e-3)]
    own = [DeviceCalibration(curve, 0.6, 0.0, 0.0) for curve in curves]
    exchange = Exchange(other_seconds=0.01)
    calibration = {
        "devices": [one.to_dict() for one in own],
        "exchange": exchange.to_dict(),
        "predicted_step_seconds": 1.0,
    }
    left = replan(plan(0.34, 0.33, 0.33, calibration=calibration), [0, 2])
    assert left.local_batch_sizes == (80, 20)
    assert left.calibration is not None
    assert len(left.calibration["devices"]) == 2
    assert left.calibration["predicted_step_seconds"] == pytest.approx(0.09)


def test_one_more() -> None:
    more = extended(plan(0.5, 0.5), CPU[2], 0.2, "float32", 1)
    assert more.local_batch_sizes == (40, 40, 20)
    assert [device.id for device in more.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert more.threads == (1, 2, 1)
    assert replan(more, [0, 1]).local_batch_sizes == (50, 50)

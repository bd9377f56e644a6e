"""Simulated clusters: the same numbers as device by device, and thousands of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plan_on

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.equal import Equal
from hetexp.balancing.manual import Manual
from hetexp.balancing.profiled import Profiled
from hetexp.balancing.tflops import Tflops
from hetexp.balancing.vram import Vram
from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.hardware.catalogue import shipped
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.hardware.links import build_links
from hetexp.plan.device_estimates import CATALOGUE, DeviceEstimates
from hetexp.plan.predict.scale import ALL, BEST, MOST, Scaled, ScaledRow, scaled

NETWORK = shipped().links["ethernet_10g"]
POLICIES: Mapping[str, BalancingPolicy] = {
    "equal": Equal(),
    "tflops": Tflops(),
    "vram": Vram(),
    "profiled": Profiled(),
}
BUCKETS = Exchange(((0.5, 10**6), (1.0, 10**6)))


def box(*names: str, total: int = 64) -> Plan:
    devices = [EmulatedBackend.describe_card(i, shipped().cards[name]) for i, name in enumerate(names)]
    return plan_on(devices, {"trainer": {"global_batch_size": total}}, collective_backend="gloo")


def known(plan: Plan, seconds: list[float], exchange: Exchange = BUCKETS) -> DeviceEstimates:
    curves = tuple(DeviceCalibration(SpeedCurve(1e-3, s), 0.6, 0.0, 0.0) for s in seconds)
    return DeviceEstimates(curves, (CATALOGUE,) * len(curves), plan.devices, exchange)


def ask(plan: Plan, seconds: list[float], count: int, exchange: Exchange = BUCKETS) -> Scaled:
    return scaled(plan, known(plan, seconds, exchange), count, POLICIES, NETWORK)


def row(found: Scaled, policy: str) -> ScaledRow:
    (one,) = [one for one in found.rows if one.policy == policy]
    return one


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([("rtx_3090", "arc_a770"), ("rtx_3090", "t4"), ("t4",), ("a100", "rx_6600", "t4")]),
    st.integers(0, 9),
    st.lists(st.floats(1e-4, 1e-2), min_size=3, max_size=3),
)
def test_as_device_by_device(names: tuple[str, ...], more: int, seconds: list[float]) -> None:
    plan, size, count = box(*names), len(names), len(names) + more
    found = ask(plan, seconds[:size], count)
    one = row(found, "equal")
    hosts = [replace(plan.devices[i % size], host=f"{i // size}") for i in range(count)]
    links = build_links(hosts, NETWORK.model_dump())
    curves = known(plan, seconds[:size]).devices
    devices = [curve for i in range(count) if (curve := curves[i % size]) is not None]
    assert found.total == 64 * count // size
    counts = [found.total // count + (i < found.total % count) for i in range(count)]
    assert one.step_seconds == joint_seconds(devices, counts, links, BUCKETS)
    assert sum(kind.samples for kind in one.kinds) == found.total
    assert sum(kind.devices for kind in one.kinds) == one.devices == count
    assert (row(found, BEST).step_seconds or 0) <= (row(found, ALL).step_seconds or 0)


def test_ten_thousand_devices_of_five_kinds() -> None:
    plan = box("rtx_4090", "t4", "rx_6600", "arc_a770", "t4", total=500)
    found = ask(plan, [1e-3, 9e-3, 8e-3, 4e-3, 9e-3], 10_000)
    assert (found.num_devices, found.num_hosts, found.total) == (10_000, 2000, 1_000_000)
    best = row(found, ALL)
    assert best.devices == 10_000
    assert [kind.devices for kind in best.kinds] == [2000, 4000, 2000, 2000]  # both T4s are one kind
    for one in found.rows:
        assert one.problem is None
        assert sum(kind.samples for kind in one.kinds) == found.total
        for kind in one.kinds:
            assert kind.most - kind.fewest <= 1
    assert (best.compute_seconds or 0) < (row(found, "equal").compute_seconds or 0) / 2
    # One rank of each of 2000 hosts in a ring by gloo: 2 · 1,999 rounds of its latency for each bucket are
    # more than the work of all. Cards of one kind go without it.
    assert row(found, BEST).devices == 2000
    assert (row(found, BEST).step_seconds or 0) < 0.6 * (best.step_seconds or 0)


def test_without_exchange_all_devices_take_part_and_efficiency_nears_one() -> None:
    found = ask(box("rtx_4090", "t4", total=4000), [1e-4, 1e-3], 100, Exchange())
    best = row(found, BEST)
    assert best.devices == 100
    assert best.efficiency == pytest.approx(1.0, abs=0.02)
    assert row(found, "equal").efficiency == pytest.approx(2 * 1 / 11, rel=0.05)


def test_one_box_is_the_box() -> None:
    plan = box("rtx_3090", "arc_a770")
    found = ask(plan, [1e-3, 3e-3], 2)
    devices = [one for one in known(plan, [1e-3, 3e-3]).devices if one is not None]
    links = build_links(plan.devices)
    assert row(found, "equal").step_seconds == joint_seconds(devices, (32, 32), links, BUCKETS)
    assert found.num_hosts == 1


def test_memory_is_kept() -> None:
    plan = box("rtx_3090", "arc_a770")
    limited = known(plan, [1e-3, 3e-3]).limited([30, None], [None, None])
    found = scaled(plan, limited, 20, POLICIES, NETWORK)
    assert row(found, "equal").problem == "does not fit emulated:0 (RTX 3090 (emulated))"
    assert row(found, ALL).kinds[0].most == 30
    nothing = known(plan, [1e-3, 3e-3]).limited([0, 0], [None, None])
    assert "find no place" in (row(scaled(plan, nothing, 20, POLICIES, NETWORK), BEST).problem or "")


def test_a_policy_that_cannot_share_says_so() -> None:
    plan = box("rtx_3090", "arc_a770")
    found = scaled(plan, known(plan, [1e-3, 3e-3]), 4, {"manual": Manual([1, 2])}, NETWORK)
    assert "`balancing.weights` must be 4 numbers" in (row(found, "manual").problem or "")


@pytest.mark.parametrize("count", [1, MOST + 1])
def test_how_many(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"`--scale` must be from 2, the devices given, to {MOST}"):
        ask(box("t4", "l4"), [1e-3, 1e-3], count)

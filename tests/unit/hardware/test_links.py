"""From devices to channels: what lies between cards of one vendor, of several, and between hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import plan_on

from hetexp.comm.compression import compressor_of
from hetexp.core.cost.step import Channel, Wire
from hetexp.core.device import DeviceSpec
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.catalogue import card, shipped
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.hardware.links import (
    HOST_EXCHANGE,
    SHARED_EXCHANGE,
    UNPACED,
    build_links,
    channel,
    links_of,
    wire_of,
)

CONFIG = {"trainer": {"global_batch_size": 8}}
PCIE3_X16, PCIE4_X16 = Channel(1e-5, 15.754e9 * 0.8), Channel(1e-5, 31.508e9 * 0.8)


def emulated(*names: str) -> list[DeviceSpec]:
    return [EmulatedBackend.describe_card(index, card(name)) for index, name in enumerate(names)]


REAL = DeviceSpec("cuda:0", "cuda", 0, "NVIDIA GeForce RTX 4090", "nvidia", 24 * 2**30)


def test_a_link_carries_what_it_reaches_of_its_rate() -> None:
    found = channel(shipped().links["ethernet_10g"])
    assert found.latency_seconds == 5e-5
    assert found.bytes_per_second == pytest.approx(1.25e9 * 0.9)
    assert found.seconds(1.125e9) == pytest.approx(1.0 + 5e-5)
    assert channel(shipped().links["pcie4x16"]) == PCIE4_X16


def test_one_vendor_exchanges_over_its_own_links() -> None:
    built = build_links(emulated("rtx_3090", "rtx_4090"))
    assert not built.staged
    assert built.device == (PCIE4_X16, PCIE4_X16)
    assert built.exchange == (PCIE4_X16,)
    assert built.to_host_seconds(0, 1e9) == 0.0
    assert built.exchange_seconds(1e9) == pytest.approx(2e-5 + 1e9 / (31.508e9 * 0.8))


def test_the_slowest_link_decides_within_a_vendor() -> None:
    built = build_links(emulated("rtx_3090", "rtx_2080_ti", "rtx_3090"))
    assert built.exchange == (PCIE3_X16,)
    assert built.exchange_seconds(3e9) == pytest.approx(4e-5 + 4e9 / (15.754e9 * 0.8))


def test_the_slowest_rate_and_the_longest_latency_need_not_be_of_one_card() -> None:
    facts = card("rtx_3090").model_dump(mode="json")
    quick, late = (
        replace(
            EmulatedBackend.describe_card(index, card("rtx_3090")),
            card_facts=facts
            | {"host_link": {"gb_per_second": rate, "efficiency": 1.0, "latency_seconds": latency}},
        )
        for index, (rate, latency) in enumerate([(1.0, 1e-6), (100.0, 1e-3)])
    )
    assert build_links([quick, late]).exchange == (Channel(1e-3, 1e9),)


@pytest.mark.parametrize(
    "names",
    [
        ("rtx_3090", "arc_a770"),
        ("rtx_3090", "rx_7900_xtx"),
        ("rtx_4090", "m2_max"),
        ("a100", "h100", "rx_6600"),
    ],
)
def test_two_vendors_meet_in_the_hosts_memory(names: tuple[str, ...]) -> None:
    built = build_links(emulated(*names))
    assert built.staged
    assert built.exchange == (SHARED_EXCHANGE,)
    assert built.device == tuple(channel(card(name).host_link) for name in names)
    for rank, name in enumerate(names):
        assert built.to_host_seconds(rank, 1e8) == pytest.approx(card(name).host_link.seconds(1e8))


def test_cpus_meet_in_the_hosts_memory() -> None:
    built = build_links(emulated("desktop_cpu_16", "desktop_cpu_16"))
    assert built.staged
    assert built.exchange == (SHARED_EXCHANGE,)


@pytest.mark.parametrize("real", [REAL, CpuBackend.describe(0)], ids=["same vendor", "cpu"])
def test_a_real_device_beside_an_emulated_one(real: DeviceSpec) -> None:
    """Its own link is as it is; what lies between them is paced."""
    built = build_links([real, *emulated("rtx_3090")])
    assert built.staged
    assert built.device == (UNPACED, PCIE4_X16)
    assert built.exchange == (SHARED_EXCHANGE,)
    assert built.to_host_seconds(0, 1e9) == 0.0


@pytest.mark.parametrize(
    ("name", "rate"),
    [("ethernet_10g", 1.25e9 * 0.9), ("ethernet_1g", 0.125e9 * 0.9), ("ethernet_100g", 12.5e9 * 0.9)],
)
@pytest.mark.parametrize("cards", [("rtx_3090", "rtx_3090"), ("rtx_3090", "arc_a770")])
def test_two_hosts_add_the_network(cards: tuple[str, str], name: str, rate: float) -> None:
    here, there = emulated(*cards)
    network = shipped().links[name].model_dump()
    near = build_links([here, there], network)
    assert len(near.exchange) == 1
    far = build_links([here, replace(there, host="b")], network)
    assert far.device == near.device and far.staged == near.staged
    network_seconds = 2 * 5e-5 + 1e9 / rate
    # Alone on its host a rank shares no memory: gloo takes the bytes to the network.
    before = near.exchange_seconds(1e9) if not near.staged else 2e-4 + 1e9 / 1.7e9
    assert far.exchange_seconds(1e9) == pytest.approx(before + network_seconds)


def test_hosts_of_several_meet_by_one_rank_each() -> None:
    """Three and two cards: memory on each host, then a ring of two over gloo and the network."""
    devices = emulated("rtx_3090", "arc_a770", "rtx_3090", "rtx_3090", "arc_a770")
    hosts = [replace(device, host=host) for device, host in zip(devices, "aaabb", strict=True)]
    network = shipped().links["ethernet_10g"].model_dump()
    built = build_links(hosts, network)
    memory = 1e-4 + (3 * 3 - 2) / 4 * 1e9 / SHARED_EXCHANGE.bytes_per_second
    ring = 2e-4 + 1e9 / 1.7e9 + 1e-4 + 1e9 / (1.25e9 * 0.9)
    assert built.exchange_seconds(1e9) == pytest.approx(memory + ring)
    flat = build_links(hosts, network, shared_memory=False)
    assert flat.exchange == (HOST_EXCHANGE, channel(shipped().links["ethernet_10g"]))
    assert flat.exchange_seconds(1e9) == pytest.approx(8 * 1.5e-4 + 1.6 * (1e9 / 1.7e9 + 1e9 / 1.125e9))


@pytest.mark.parametrize("backend", ["auto", "shm", "gloo"])
def test_the_configuration_decides(backend: str) -> None:
    plan = plan_on(
        emulated("rtx_3090", "arc_a770"), CONFIG | {"comm": {"backend": backend, "wire": "bfloat16"}}
    )
    built = links_of(plan)
    assert built.exchange == (HOST_EXCHANGE if backend == "gloo" else SHARED_EXCHANGE,)
    assert built.wire == 0.5
    assert links_of(plan, plan.devices[:1]).world_size == 1
    measured = Channel(1e-3, 5e9, shared=True)
    assert links_of(plan, measured=measured).exchange == (measured,)


@pytest.mark.parametrize(
    ("wire", "precision", "part"),
    [
        ("float32", "float32", 1.0),
        ("float32", "float64", 1.0),
        ("bfloat16", "float32", 0.5),
        ("bfloat16", "float64", 0.25),
        ("int8", "bfloat16", 260 / 1024),
    ],
)
def test_what_travels_of_a_number(wire: Wire, precision: str, part: float) -> None:
    plan = replace(plan_on(emulated("t4", "t4"), CONFIG), precisions=(precision,) * 2)
    assert wire_of(plan, wire) == part
    codec = compressor_of(wire)
    if codec is not None:
        assert codec.num_bytes(2560) == part * 2560 * (8 if precision == "float64" else 4)


def test_several_devices_of_one_other_host_need_no_network() -> None:
    devices = [replace(device, host="b") for device in emulated("rtx_3090", "rtx_3090")]
    assert len(build_links(devices).exchange) == 1


def test_one_device_exchanges_nothing() -> None:
    assert build_links(emulated("rtx_3090")).exchange_seconds(1e9) == 0.0

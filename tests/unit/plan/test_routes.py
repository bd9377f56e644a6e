"""Which libraries carry a sum: every rank has exactly one way to the root, and leaders are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import plan_on, unbuilt_config

from hetexp.core.device import DeviceSpec
from hetexp.core.topology import Group, Topology
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.catalogue import card
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.plan.routes import choose_collective, choose_route, choose_routes, routed, routes_to_try

CPU = [CpuBackend.describe(i) for i in range(3)]
CUDA = [
    DeviceSpec(f"cuda:{i}", "cuda", i, f"Card {i}", "nvidia", pci=f"0000:0{i}:00.0", uuid=f"GPU-{i}")
    for i in range(3)
]
HIP = [DeviceSpec(f"hip:{i}", "hip", i, f"Radeon {i}", "amd", pci=f"0000:1{i}:00.0") for i in range(2)]
EMULATED = [EmulatedBackend.describe_card(i, card("rtx_3090")) for i in range(4)]
SHARED = [CUDA[0], replace(CUDA[0], id="cuda:0.1")]


def shm(*ranks: int) -> Group:
    return Group("shm", ranks)


@pytest.mark.parametrize(
    ("devices", "wanted", "collective", "levels"),
    [
        (CPU[:1], "auto", "gloo", []),
        (CUDA[:1], "auto", "nccl", []),
        (CPU, "auto", "gloo", [[shm(0, 1, 2)]]),
        (CPU, "gloo", "gloo", [[Group("gloo", (0, 1, 2))]]),
        (EMULATED[:2], "auto", "gloo", [[shm(0, 1)]]),
        (CUDA, "auto", "nccl", [[Group("nccl", (0, 1, 2))]]),
        (CUDA, "native", "nccl", [[Group("nccl", (0, 1, 2))]]),
        (CUDA, "shm", "gloo", [[shm(0, 1, 2)]]),
        (CUDA, "gloo", "gloo", [[Group("gloo", (0, 1, 2))]]),
        (HIP, "auto", "nccl", [[Group("nccl", (0, 1))]]),
        # One card, twice or cut: NCCL refuses it, shared memory does not.
        (SHARED, "auto", "gloo", [[shm(0, 1)]]),
        ([replace(CUDA[0], uuid="MIG-0"), replace(CUDA[0], uuid="MIG-1")], "auto", "gloo", [[shm(0, 1)]]),
        ([*SHARED, CUDA[1]], "auto", "gloo", [[shm(0, 1, 2)]]),
        ([CUDA[0], HIP[0]], "auto", "gloo", [[shm(0, 1)]]),
        # AMD's library answers to NVIDIA's name, and the two do not understand each other.
        (
            [*HIP, *CUDA[:2]],
            "auto",
            "gloo",
            [[Group("nccl", (0, 1)), Group("nccl", (2, 3))], [shm(0, 2)]],
        ),
        ([CUDA[0], CPU[0], CUDA[1]], "auto", "gloo", [[Group("nccl", (0, 2))], [shm(0, 1)]]),
        ([CPU[0], *CUDA[:2]], "shm", "gloo", [[shm(0, 1, 2)]]),
        (
            [replace(one, host="ab"[i // 2]) for i, one in enumerate(EMULATED)],
            "auto",
            "gloo",
            [[shm(0, 1), shm(2, 3)], [Group("gloo", (0, 2))]],
        ),
        (
            [replace(one, host="ab"[i]) for i, one in enumerate(EMULATED[:2])],
            "shm",
            "gloo",
            [[Group("gloo", (0, 1))]],
        ),
    ],
)
def test_the_chosen_route(
    devices: list[DeviceSpec], wanted: str, collective: str, levels: list[list[Group]]
) -> None:
    assert choose_collective(wanted, devices) == collective
    assert choose_route(wanted, devices) == Topology(tuple(tuple(level) for level in levels))


KINDS = st.sampled_from([*CPU[:1], *CUDA, *HIP, *EMULATED[:1], SHARED[1]])
HOSTS = st.sampled_from([None, "a", "b"])


@given(
    st.lists(st.builds(lambda kind, host: replace(kind, host=host), KINDS, HOSTS), min_size=2, max_size=12),
    st.sampled_from(["auto", "native", "shm", "gloo"]),
)
def test_every_rank_has_one_way_to_the_root(devices: list[DeviceSpec], wanted: str) -> None:
    for route in choose_routes(wanted, devices):
        waiting = set(range(len(devices)))  # for a sum that is not all ranks' yet
        for level in route.levels:
            members = [rank for group in level for rank in group.ranks]
            assert len(set(members)) == len(members)
            assert set(members) <= waiting
            waiting -= {rank for group in level for rank in group.ranks[1:]}
            for group in level:
                assert len(group.ranks) > 1
                assert list(group.ranks) == sorted(group.ranks)
                hosts = {devices[rank].host for rank in group.ranks}
                assert group.library != "shm" or len(hosts) == 1
                if group.library == "nccl":
                    assert len({devices[rank].backend for rank in group.ranks}) == 1
                    cards = {(devices[rank].host, devices[rank].pci) for rank in group.ranks}
                    assert len(cards) == len(group.ranks)
        assert len(waiting) == 1
        assert len(route.levels[-1]) == 1
        root = waiting.pop()
        assert sorted(route.below(root, len(route.levels))) == list(range(len(devices)))


def test_what_takes_the_place_of_a_route_that_fails() -> None:
    mixed = [*CUDA[:2], CPU[0]]
    assert [route.name for route in choose_routes("auto", CUDA)] == ["nccl", "shm", "gloo"]
    assert [route.name for route in choose_routes("auto", mixed)] == ["nccl + shm", "shm", "gloo"]
    assert [route.name for route in choose_routes("auto", CPU)] == ["shm", "gloo"]
    for forced in ("native", "shm", "gloo"):
        assert len(choose_routes(forced, CUDA)) == 1


def plan(devices: list[DeviceSpec], **changes: Any) -> Any:
    return routed(plan_on(devices, unbuilt_config(comm={}), **changes))


def test_the_plan_says_what_carries_the_exchange() -> None:
    mixed = plan([*CUDA[:2], CPU[0]], route=Topology(), reasons=("Because.",))
    assert mixed.reasons == (
        "Because.",
        "The exchange goes by nccl over cuda:0 + cuda:1, then by shm over cuda:0 + cpu:0.",
    )
    assert mixed.collective_backend == "gloo"
    # Without the processor it is another one, which is told in the old one's place.
    left = routed(replace(mixed, devices=mixed.devices[:2]))
    assert left.reasons == ("Because.", "The exchange goes by nccl, as all devices are one vendor's.")
    assert (left.collective_backend, left.way.name) == ("nccl", "nccl")
    assert plan(CPU, route=Topology()).reasons == (
        "The exchange goes by shm, in memory that all ranks share (cpu).",
    )
    assert plan(CPU[:1], route=Topology()).reasons == ()


def test_ranks_form_another_group_if_their_libraries_can_abort() -> None:
    xpu = [replace(device, id=f"xpu:{place}", backend="xpu") for place, device in enumerate(CUDA)]
    for devices, able in ((CUDA, True), ([*CUDA[:2], CPU[0]], True), (CPU, True), (xpu, False)):
        assert plan(devices, route=Topology()).reforms is able
    assert not plan([*xpu[:2], CPU[0]], route=Topology()).reforms
    assert plan([xpu[0], CPU[0]], route=Topology()).reforms  # shared memory joins them


def test_a_strategy_without_a_large_exchange_tries_its_process_group() -> None:
    assert plan(CUDA).route is None
    assert plan(CUDA).reasons == ()
    assert [route.name for route in routes_to_try(plan(CUDA))] == ["nccl", "gloo"]
    assert [route.name for route in routes_to_try(plan(CPU))] == ["gloo"]
    assert routes_to_try(plan(CUDA[:1])) == [Topology()]


def test_ranks_try_what_the_plan_says_first() -> None:
    made = plan(CUDA, route=Topology())
    assert [route.name for route in routes_to_try(made)] == ["nccl", "shm", "gloo"]
    assert routes_to_try(replace(made, route=Topology.flat("gloo", 3)))[0].name == "gloo"

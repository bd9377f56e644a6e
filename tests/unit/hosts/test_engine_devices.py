from __future__ import annotations

from typing import Any

from support import plan_on, unbuilt_config

from hetexp.core.device import DeviceSpec
from hetexp.core.rank_env import RankEnv
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.selection.pool import Selection
from hetexp.hosts.engine_devices import device_report, gather_devices, threads_of


def rank_env(rank: int, local_rank: int, node: str = "0", host: str = "box") -> RankEnv:
    return RankEnv("torchrun", rank, 4, local_rank, "127.0.0.1", 1, node, host)


def card(index: int, **changes: Any) -> DeviceSpec:
    return DeviceSpec(f"cuda:{index}", "cuda", index, "RTX 3090", "nvidia", **changes)


def report_of(selection: Selection, env: RankEnv) -> dict[str, Any]:
    return device_report(selection, env, "127.0.0.1")


def test_local_rank_counts_to_the_device() -> None:
    chosen = Selection(devices=[card(0), card(2)])
    found = [report_of(chosen, rank_env(rank, rank))["device"]["id"] for rank in (0, 1)]
    assert found == ["cuda:0", "cuda:2"]


def test_a_host_on_its_cpu_has_as_many_ranks_as_processes() -> None:
    found = report_of(Selection(devices=[CpuBackend.describe(0)]), rank_env(2, 2))
    assert found["device"]["id"] == "cpu:2"
    assert not found["problems"]


def test_more_processes_than_cards() -> None:
    (problem,) = report_of(Selection(devices=[card(0)]), rank_env(1, 1))["problems"]
    assert "`hardware` must choose a device for each process" in problem
    assert "1 (cuda:0 (RTX 3090))" in problem
    reports = [report_of(Selection(devices=[card(0)]), rank_env(1, 1))] * 2
    (again,) = gather_devices(reports, "torchrun").problems
    assert again == problem


def test_another_interpreter() -> None:
    (problem,) = report_of(Selection(devices=[card(0, python="/opt/hip/bin/python")]), rank_env(0, 0))[
        "problems"
    ]
    assert "must name no interpreter where torchrun starts the ranks" in problem


def test_one_host_keeps_its_ids() -> None:
    chosen = Selection(devices=[card(0), card(1)], reasons=["all usable"])
    found = gather_devices([report_of(chosen, rank_env(rank, rank)) for rank in (0, 1)], "torchrun")
    assert [(device.id, device.host) for device in found.devices] == [("cuda:0", None), ("cuda:1", None)]
    assert found.reasons[0] == "all usable"


def test_hosts_of_one_name() -> None:
    chosen = Selection(devices=[card(0), card(1)])
    envs = [rank_env(0, 0), rank_env(1, 1), rank_env(2, 0, "1"), rank_env(3, 1, "1")]
    found = gather_devices([report_of(chosen, env) for env in envs], "torchrun")
    assert [device.id for device in found.devices] == [
        "cuda:0@box-0",
        "cuda:1@box-0",
        "cuda:0@box-1",
        "cuda:1@box-1",
    ]
    assert [device.host for device in found.devices] == ["box-0", "box-0", "box-1", "box-1"]
    assert "4 ranks on 2 hosts (box-0, box-1)" in found.reasons[-1]
    assert not found.problems


def test_a_device_without_a_process_is_reported() -> None:
    chosen = Selection(devices=[card(0), card(1)])
    envs = [rank_env(0, 0, "0", "a"), rank_env(1, 0, "1", "b")]
    found = gather_devices([report_of(chosen, env) for env in envs], "slurm")
    assert [device.id for device in found.devices] == ["cuda:0@a", "cuda:0@b"]
    assert "cuda:1 (RTX 3090) of b has no process, and stays idle." in found.reasons


def test_two_processes_with_one_local_rank() -> None:
    chosen = Selection(devices=[card(0)])
    (problem,) = gather_devices(
        [report_of(chosen, rank_env(0, 0)), report_of(chosen, rank_env(1, 0))], "torch"
    ).problems
    assert "`LOCAL_RANK` must differ" in problem


def test_threads_are_shared_on_each_host() -> None:
    devices = [
        DeviceSpec("cpu:0@a", "cpu", 0, "CPU", "cpu", host="a"),
        DeviceSpec("cpu:1@a", "cpu", 1, "CPU", "cpu", host="a"),
        DeviceSpec("cpu:0@b", "cpu", 0, "CPU", "cpu", host="b"),
        DeviceSpec("cuda:0@c", "cuda", 0, "card", "nvidia", host="c"),
    ]
    plan = plan_on(devices, unbuilt_config())
    cores = {"cpu:0@a": 8, "cpu:1@a": 8, "cpu:0@b": 6, "cuda:0@c": 32}
    assert threads_of(plan, cores, None) == (4, 4, 6, 4)
    assert threads_of(plan, cores, 2) == (2, 2, 2, 2)

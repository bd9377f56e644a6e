"""What a rank finds in its environment."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import plan_on, unbuilt_config

from hetexp.core.config import read_config
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.processes.members import environment_of, start_member
from hetexp.launch.processes.process import import_ahead, may_fork
from hetexp.plan.exchange_checks import SET_BY_HETEXP


def test_variables_of_the_configuration_and_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("RANK", "7")
    wanted = {"NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": True, "GLOO_SOCKET_IFNAME": "eth0", "N": 3}
    plan = plan_on([CpuBackend.describe(0)], unbuilt_config(comm={"env": wanted}))
    given = environment_of(plan, 0)
    assert {name: given[name] for name in wanted} == {
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "N": "3",
    }
    assert given["NCCL_NVLS_ENABLE"] == "0"  # inherited, as ever
    assert "RANK" not in given


def test_what_the_launcher_gives_is_refused_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SET_BY_HETEXP:
        monkeypatch.delenv(name, raising=False)
    without = environment_of(plan_on([CpuBackend.describe(0)], unbuilt_config()), 0)
    assert {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES"} <= without.keys()
    assert without.keys() - set(SET_BY_HETEXP) <= set(os.environ) | {"GLOO_SOCKET_IFNAME"}


@pytest.mark.parametrize(
    ("changes", "script", "method"),
    [
        ({}, None, "auto"),
        ({"comm": {"env": {"NCCL_DEBUG": "INFO"}}}, None, "subprocess"),
        ({}, "script.py", "subprocess"),
    ],
)
def test_auto_forks_no_rank_whose_libraries_may_read_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], script: str | None, method: str
) -> None:
    methods: list[str] = []
    monkeypatch.setattr(
        "hetexp.launch.processes.members.start_rank", lambda start, method: methods.append(method)
    )
    plan = plan_on([CpuBackend.describe(0)], unbuilt_config(**changes), run_dir=str(tmp_path))
    start_member(replace(plan, script=script), tmp_path / "plan.json", 0, "auto", "")
    assert methods == [method]


@pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux")
def test_auto_forks_on_the_cpu_only() -> None:
    assert may_fork(["cpu", "emulated"])
    assert not may_fork(["cuda"])
    assert not may_fork(["cpu", "cuda"])


@pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux")
@pytest.mark.parametrize(
    ("changes", "backends", "imports"),
    [
        ({}, ["cpu"], True),
        ({}, ["cuda", "cpu"], True),
        ({}, ["cuda"], False),
        ({"plan_only": True}, ["cpu"], False),
        ({"launch": {"start_method": "subprocess"}}, ["cpu"], False),
        ({"launch": {"start_method": "forkserver"}}, ["cuda"], True),
        ({"comm": {"env": {"A": "1"}}}, ["cpu"], False),
    ],
)
def test_the_fork_server_imports_ahead_if_a_rank_will_be_forked(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], backends: list[str], imports: bool
) -> None:
    started: list[bool] = []
    monkeypatch.setattr("hetexp.launch.processes.process.start_fork_server", lambda: started.append(True))
    import_ahead(read_config(unbuilt_config(**changes)), backends)
    assert bool(started) == imports

"""What a rank finds in its environment."""

from __future__ import annotations

import os

import pytest
from support import plan_on, unbuilt_config

from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.processes.members import environment_of
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

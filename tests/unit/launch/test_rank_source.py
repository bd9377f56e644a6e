"""Each source of ranks selects its devices, and refuses what its ranks cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetexp.app import check, compose_config
from hetexp.core.device import DeviceSpec
from hetexp.core.rank_env import RankEnv
from hetexp.hardware.catalogue import Link
from hetexp.hosts.cluster_ranks import JoinedCluster
from hetexp.hosts.engine_ranks import EngineRanks
from hetexp.plan.run_spec import Request

QUICK = ("hardware=cpu", "model=mlp", "data=synthetic", "logger=none", "trainer.max_steps=1")
HOSTS = "cluster.hosts=[{name: a, address: 127.0.0.2}, {name: b, address: 127.0.0.3}]"
CPU = DeviceSpec(id="cpu:0@b", backend="cpu", index=0, name="CPU", vendor="cpu", host="b")


class Store:
    """One rank that torchrun started, alone."""

    rank_env = RankEnv("torchrun", 0, 1, 0, "127.0.0.1", 1, "0", "box")
    address = "127.0.0.1"

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def report(self, topic: str, value: Any) -> None:
        self.reports.append(value)

    def gather(self, topic: str) -> list[Any]:
        return self.reports


def checked(*overrides: str, ranks: Any = None) -> SimpleNamespace:
    result = check(compose_config([*QUICK, *overrides]), Request(Path.cwd(), Path.cwd()), ranks=ranks)
    assert result.spec is not None
    return SimpleNamespace(**vars(result.spec), problems=list(dict.fromkeys(result.problems)))


def test_a_machine_names_its_devices_before_it_has_met_the_others() -> None:
    result = checked(HOSTS, "node=a")
    assert result.problems == []
    assert {device.host for device in result.selection.devices} == {"a"}
    assert all(device.id.endswith("@a") for device in result.selection.devices)


def test_a_cluster_adds_the_devices_that_joined() -> None:
    link = Link(gb_per_second=0.1, latency_seconds=1e-4, efficiency=1.0, source="measured")
    joined = JoinedCluster(devices=[CPU, replace(CPU, id="cpu:1@b", index=1)], threads=[3, 3], names=["b"])
    joined.network = link
    result = checked(HOSTS, "node=a", ranks=joined)
    assert result.problems == []
    assert [device.id for device in result.selection.devices][-2:] == ["cpu:0@b", "cpu:1@b"]
    assert result.selection.threads[-2:] == (3, 3)
    assert result.selection.network == link
    assert "a leads; b joined it." in result.selection.reasons


def test_a_cluster_refuses_a_strategy_of_one_process() -> None:
    problems = checked(HOSTS, "node=a", "strategy=dp").problems
    assert (
        "`strategy` must be one with a process a device over several machines, but is 'dp' instead."
        in problems
    )


def test_a_name_that_no_machine_has_is_refused_once() -> None:
    request = Request(Path.cwd(), Path.cwd())
    problems = check(compose_config([*QUICK, HOSTS, "node=c"]), request).problems
    assert problems == ["`node` must be one of a, b, but is 'c' instead."]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((HOSTS,), "`cluster.hosts` must be empty where another launcher starts the ranks."),
        (("strategy.fallback=single",), "`strategy.fallback` must be null where torchrun starts the ranks"),
    ],
)
def test_another_engine_refuses_what_needs_the_launcher(overrides: tuple[str, ...], problem: str) -> None:
    problems = checked(*overrides, ranks=EngineRanks(Store())).problems  # type: ignore[arg-type]
    assert any(found.startswith(problem) for found in problems), problems


def test_another_engine_trains_without_what_needs_the_launcher() -> None:
    result = checked("fault.survive=true", ranks=EngineRanks(Store()))  # type: ignore[arg-type]
    assert result.problems == []
    assert not result.config.fault.survive
    assert not result.raw["fault"]["survive"]
    assert result.selection.reasons[-1].startswith("torchrun has started 1 ranks")

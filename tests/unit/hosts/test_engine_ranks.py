"""Rank 0 measures the network to each other host with the first rank there, which must know its token."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetexp.app import compose_config, detect_for
from hetexp.core.compose.plain import plain
from hetexp.core.config import read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.core.rank_env import RankEnv
from hetexp.hardware.selection.pool import Selection
from hetexp.hosts.engine_follower import follow_rank_0
from hetexp.hosts.engine_ranks import EngineRanks

CPU = DeviceSpec(id="cpu:0", backend="cpu", index=0, name="CPU", vendor="cpu")


class Store:
    """A rank's store in memory, which all ranks of a job share."""

    address = "127.0.0.1"

    def __init__(self, rank: int, node: str, job: list[Store]) -> None:
        self.rank_env = RankEnv("torchrun", rank, 3, int(rank == 2), "127.0.0.1", 1, node, node)
        self.reports: dict[str, Any] = {}
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._job = job
        job.append(self)

    def report(self, topic: str, value: Any) -> None:
        self.reports[topic] = value

    def gather(self, topic: str) -> list[Any]:
        deadline = time.monotonic() + 10
        while not all(topic in store.reports for store in self._job):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [store.reports[topic] for store in self._job]

    def send_command(self, command: Any) -> None:
        for store in self._job[1:]:
            store.commands.put(command)

    def next_command(self) -> Any:
        return self.commands.get(timeout=10)

    def leave(self) -> None:
        pass


def select(stranger: bool = False) -> Selection:
    """Return the devices of three ranks: one on host a, two on host b."""
    job: list[Store] = []
    leader, *others = (Store(rank, node, job) for rank, node in enumerate("abb"))
    selection = Selection(devices=[CPU, replace(CPU, id="cpu:1", index=1)])

    def follow(store: Any) -> None:
        if not stranger:
            follow_rank_0(store, selection)
            return
        with pytest.raises(SetupError, match="rank 0 has given up"):
            follow_rank_0(IgnoresToken(store), selection)  # type: ignore[arg-type]

    threads = [threading.Thread(target=follow, args=(store,)) for store in others]
    for thread in threads:
        thread.start()
    config = read_config(plain(compose_config(["hardware=cpu", "logger=none", "trainer.max_steps=1"]))[0])
    ranks: Any = EngineRanks(leader)  # type: ignore[arg-type]
    result: Selection = ranks.select(config, detect_for(config.hardware, Path.cwd()), None)
    assert ranks.select(config, None, None) == result
    ranks.end("why" if stranger else None)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return result


class IgnoresToken:
    """A store whose rank connects with another token."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def next_command(self) -> Any:
        command = self._store.next_command()
        return command | {"token": "f" * 64} if "probe" in command else command


def test_the_network_between_hosts_is_measured() -> None:
    selection = select()
    assert [device.id for device in selection.devices] == ["cpu:0@a", "cpu:0@b", "cpu:1@b"]
    assert selection.problems == []
    assert selection.network is not None
    assert selection.network.gb_per_second > 0.01
    assert 0 < selection.network.latency_seconds < 1
    assert selection.network.source.startswith("measured")
    assert "as measured" in selection.reasons[-1]


def test_another_token_measures_nothing() -> None:
    selection = select(stranger=True)
    assert selection.network is None
    (problem,) = selection.problems
    assert problem.startswith("The hosts must reach each other, but do not: its token is not this cluster's")


def test_measuring_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    select()
    assert set(threading.enumerate()) <= before

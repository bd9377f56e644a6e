"""When a lost device is started again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_store import signed
from support import plan_on, unbuilt_config

from hetexp.core.config import read_config
from hetexp.core.epoch import Departure, prepared_key, reformed_key
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.elastic.membership import Membership
from hetexp.launch.elastic.respawn import Respawns
from hetexp.launch.processes.members import Member

CPUS = [CpuBackend.describe(place) for place in range(2)]


class Process:
    """Stands for a process; `code` is its exit code."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code


class Scene:
    """A device that is lost again and again, by a clock that the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = unbuilt_config(fault={"respawn": 10, "respawn_seconds": 1.0, "spare": False})
        self.now, self.started = 0.0, list[Member]()
        self.store = signed()
        plan = plan_on(CPUS, config, run_dir=str(folder), collective_backend="gloo")
        self.membership = Membership(replace(plan, store_port=1), self.store)
        first: Any = Process()
        self.started += [Member(place, device, first, folder / "log") for place, device in enumerate(CPUS)]
        monkeypatch.setattr("hetexp.launch.elastic.respawn.time.monotonic", lambda: self.now)
        monkeypatch.setattr("hetexp.launch.elastic.respawn.start_member", self._start)
        show: Callable[[str], None] = lambda text: None  # noqa: E731
        self.respawns = Respawns(self.membership, read_config(config), self.store, self.started, show)

    def _start(
        self, plan: Any, path: Any, rank: int, method: str, secret: str, number: int, *_: Any
    ) -> Member:
        process: Any = Process()
        return Member(number, CPUS[1], process, path)

    def pause(self) -> float:
        """Return the seconds until the next start."""
        count, began = len(self.started), self.now
        while len(self.started) == count:
            self.now += 0.5
            self.respawns.poll()
        return self.now - began


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_the_pause_doubles_until_the_device_takes_part(scene: Scene) -> None:
    epoch = scene.membership.leave({1: Departure(1, "cpu:1", "SIGKILL", 0.0)})
    scene.store.write(reformed_key(epoch.number), "{}")
    assert scene.membership.take_report() is not None
    scene.respawns.after_loss(CPUS[1])
    pauses = [scene.pause()]
    for _ in range(2):
        process: Any = scene.started[-1].process
        process.code = 1  # before it is prepared
        scene.respawns.poll()
        pauses.append(scene.pause())
    assert pauses == [1.0, 2.0, 4.0]
    scene.store.write(prepared_key(scene.started[-1].number), "1")
    scene.respawns.poll()
    scene.respawns.formed(12)
    scene.respawns.after_loss(CPUS[1])
    assert scene.pause() == 1.0

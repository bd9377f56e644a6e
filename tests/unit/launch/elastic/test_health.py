"""Who is frozen: silent, and without work meanwhile; by clocks and processes that the test moves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetexp.core.epoch import beat_key
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.elastic.health import HealthMonitor, Usage, usage_of
from hetexp.launch.elastic.heartbeat import Heartbeat
from hetexp.launch.processes.members import Member

IDLE = Usage(ticks=100, stopped=False, runs=False, waits_for_disk=False)


class Scene:
    """Two members whose signs and processes the test controls; time passes in tenths of a second."""

    def __init__(self) -> None:
        self.now, self.usage = 0.0, dict.fromkeys((10, 11), IDLE)
        self.values: dict[str, str] = {}
        self.counts = [0, 0]
        process: Any
        self.members = []
        for number in range(2):
            process = type("Process", (), {"pid": 10 + number})()
            self.members.append(Member(number, CpuBackend.describe(number), process, Path("log")))
        self.watch = HealthMonitor(self, 1.0, lambda: self.now, lambda pid: self.usage[pid])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> str:
        return self.values[key]

    def beat(self, member: int, step: int = 0, doing: str = "steps") -> None:
        self.counts[member] += 1
        self.values[beat_key(member)] = Heartbeat(self.counts[member], step, doing).to_json()

    def after(self, seconds: float, *beating: int, works: bool = False) -> set[int]:
        """Return who was found frozen while these members beat and the others did not."""
        found = set()
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for member in beating:
                self.beat(member)
            if works:
                self.usage[11] = replace(self.usage[11], ticks=self.usage[11].ticks + 1)
            found |= {member.number for member in self.watch.frozen(self.members)}
        return found


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    assert scene.after(3) == set()  # nobody has begun
    assert scene.after(3, 0, 1) == set()
    return scene


def test_a_stopped_process(scene: Scene) -> None:
    scene.usage[11] = replace(IDLE, stopped=True)
    assert scene.after(0.9, 0) == set()
    assert scene.after(0.4, 0) == {1}


def test_one_that_waits_in_a_driver(scene: Scene) -> None:
    assert scene.after(0.9, 0) == set()
    assert scene.after(0.4, 0) == {1}


def test_one_that_computes_and_one_that_is_starved_live(scene: Scene) -> None:
    assert scene.after(5, 0, works=True) == set()
    scene.usage[11] = replace(scene.usage[11], runs=True)
    assert scene.after(5, 0) == set()
    scene.usage[11] = replace(scene.usage[11], runs=False)
    assert scene.after(0.7, 0) == set()
    assert scene.after(0.6, 0) == {1}


def test_one_that_waits_for_a_disk_gets_longer(scene: Scene) -> None:
    scene.usage[11] = replace(IDLE, waits_for_disk=True)
    assert scene.after(4.8, 0) == set()
    assert scene.after(0.5, 0) == {1}


def test_where_the_system_tells_nothing(scene: Scene) -> None:
    scene.usage[11] = None  # type: ignore[assignment]
    assert scene.after(4.8, 0) == set()
    assert scene.after(0.5, 0) == {1}


def test_a_launcher_that_was_stopped_itself_blames_nobody(scene: Scene) -> None:
    scene.now += 60
    assert scene.after(0.8) == set()
    assert scene.after(0.6) == {0, 1}


def test_how_far_a_member_is(scene: Scene) -> None:
    beat = scene.watch.beat_of(0)
    assert beat is not None
    assert beat.step == 0
    assert scene.watch.beat_of(2) is None
    assert scene.watch.seconds_in_step(0) == pytest.approx(2.9, abs=0.2)
    scene.beat(0, step=1)
    scene.after(0.1)
    assert scene.watch.seconds_in_step(0) == pytest.approx(0.0)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel does not tell")
def test_what_the_kernel_tells(sleeper: subprocess.Popen[bytes]) -> None:
    def stopped() -> bool:
        usage = usage_of(sleeper.pid)
        return usage is not None and usage.stopped

    assert not stopped()
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert stopped()
    own = usage_of(os.getpid())
    assert own is not None
    assert own.runs
    assert own.ticks > 0
    assert usage_of(2**22 + 1) is None


def test_a_launcher_that_did_not_look_for_long_blames_no_rank(scene: Scene) -> None:
    """It was stopped itself, and so maybe were the ranks: their silence counts from then on."""
    assert scene.after(0.4) == set()
    scene.now += 5.0
    assert scene.after(0.8) == set()
    assert scene.after(0.5) == {0, 1}

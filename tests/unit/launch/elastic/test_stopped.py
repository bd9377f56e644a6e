"""A stopped process is known after the time that it may be, and not where the launcher was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.elastic.health import Usage
from hetexp.launch.elastic.stopped import StoppedWatch
from hetexp.launch.processes.members import Member


class Scene:
    """Two members, of which those in `stopped` stand still."""

    def __init__(self) -> None:
        self.now, self.stopped = 0.0, set[int]()
        process: Any
        self.members = []
        for number in range(2):
            process = type("Process", (), {"pid": 10 + number})()
            self.members.append(Member(number, CpuBackend.describe(number), process, Path("log")))
        self.watch = StoppedWatch(1.0, lambda: self.now, self._usage)

    def _usage(self, pid: int) -> Usage | None:
        return Usage(ticks=0, stopped=pid - 10 in self.stopped, runs=False, waits_for_disk=False)

    def after(self, seconds: float) -> dict[int, float]:
        """Return for how long who has been stopped, time passing in twentieths of a second."""
        found: dict[Member, float] = {}
        for _ in range(round(seconds * 20)):
            self.now += 0.05
            found = self.watch.look(self.members)
        return {member.number: spent for member, spent in found.items()}


def test_a_stopped_process() -> None:
    scene = Scene()
    assert scene.after(3.0) == {}
    scene.stopped = {1}
    found = scene.after(1.5)
    assert found.keys() == {1} and 1.2 < found[1] <= 1.5
    scene.stopped = set()
    assert scene.after(0.3) == {}
    scene.stopped = {1}
    assert scene.after(0.5)[1] < 0.6  # it begins anew


def test_a_launcher_that_was_stopped_itself() -> None:
    scene = Scene()
    scene.stopped = {0, 1}
    scene.after(0.8)
    scene.now += 5.0
    assert all(spent < 0.6 for spent in scene.after(0.5).values())

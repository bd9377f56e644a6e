"""A step that takes too long: the bound, and whose stack is the reason; by clocks that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.elastic import hang_detection
from hetexp.launch.elastic.hang_detection import (
    FIRST_SECONDS,
    LEAST_SECONDS,
    HangWatch,
    innermost_frame,
    waits,
)
from hetexp.launch.elastic.heartbeat import Heartbeat
from hetexp.launch.processes.failure import stack_path
from hetexp.launch.processes.members import Member

OUTER = (
    '  File "/x/hetexp/training/loop.py", line 9 in steps\n'
    '  File "/x/hetexp/worker.py", line 82 in run_rank\n'
)
OTHER = (
    "Thread 0x0002 (most recent call first):\n"
    '  File "/x/hetexp/comm/connections/pulse.py", line 3 in beat\n\n'
)


def stack(*files: str) -> str:
    """Return what faulthandler writes of a rank whose main thread is in these files, the innermost first."""
    inner = "".join(f'  File "{file}", line 7 in inner\n' for file in files)
    head = "Current thread 0x0001 (most recent call first):"
    return f"{OTHER}{head}\n{inner}{OUTER}"


WAITS = stack("/x/hetexp/comm/communicator.py", "/x/hetexp/training/normalizer.py")
SLEEPS = stack("/usr/lib/python3.11/threading.py", "/home/me/model.py", "/x/torch/nn/parallel/distributed.py")
LOADS = stack("/home/me/data.py", "/x/torch/utils/data/dataloader.py")
BUILDS = stack("/x/torch/_inductor/compile_fx.py")


class Scene:
    """Members whose steps and stacks the test decides."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        self.now, self.step, self.doing = 0.0, 0, "steps"
        self.since = 0.0
        self.mean: float | None = None
        self.stacks = [WAITS] * count
        process: Any = None
        self.members = [
            Member(number, CpuBackend.describe(number), process, folder / f"rank_{number}.log")
            for number in range(count)
        ]
        watch: Any = self
        self.hangs = HangWatch(watch, 0.5, lambda: self.now)

    def beat_of(self, member: int) -> Heartbeat:
        return Heartbeat(1, self.step, self.doing, self.mean)

    def seconds_in_step(self, member: int) -> float:
        return self.now - self.since

    def write_stack(self, member: Member) -> None:
        with stack_path(member.log_path).open("a") as file:
            file.write(self.stacks[member.number])

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            self.step, self.since = self.step + 1, self.now
            assert self.hangs.find_hung(self.members) == []

    def after(self, seconds: float) -> list[tuple[int, str]]:
        found = []
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            found += [(one.member.number, one.place) for one in self.hangs.find_hung(self.members)]
        return found


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(tmp_path)
    monkeypatch.setattr(hang_detection, "_ask_for_stack", scene.write_stack)
    return scene


def test_the_bound_follows_the_steps(scene: Scene) -> None:
    assert scene.hangs.bound_seconds == FIRST_SECONDS
    scene.steps(10, 0.01)
    assert scene.hangs.bound_seconds == LEAST_SECONDS
    scene.steps(40, 2.0)
    assert scene.hangs.bound_seconds == pytest.approx(40.0)


def test_a_rank_that_hangs_before_its_steps_were_seen(scene: Scene) -> None:
    scene.step, scene.mean, scene.stacks[1] = 4, 0.5, SLEEPS
    assert scene.after(10.0) == []
    assert scene.hangs.bound_seconds == pytest.approx(10.0)
    assert scene.after(1.0) == [(1, "inner (/home/me/model.py:7)")]


def test_the_rank_that_does_not_wait_is_named(scene: Scene) -> None:
    scene.steps(5, 0.1)
    scene.stacks[1] = SLEEPS
    assert scene.after(5.0) == []
    assert scene.after(1.0) == [(1, "inner (/home/me/model.py:7)")]
    scene.steps(1, 0.1)
    scene.stacks[1], scene.stacks[2] = WAITS, ""
    assert scene.after(40.0)[0] == (2, "an unknown place: it does not even take signals")


def test_who_is_slow_for_a_reason_is_let_be(scene: Scene) -> None:
    scene.steps(5, 0.1)
    scene.stacks[1] = LOADS
    assert scene.after(50.0) == []
    assert scene.after(50.0)[0][0] == 1  # longer than any disk
    scene.stacks = [WAITS, BUILDS, WAITS]
    assert scene.after(200.0) == []
    scene.stacks = [SLEEPS] * 3  # nobody waits for anybody
    assert scene.after(200.0) == []
    scene.doing = "between steps"
    scene.stacks = [WAITS, SLEEPS, WAITS]
    assert scene.after(200.0) == []


def test_all_that_wait_for_each_other(scene: Scene) -> None:
    scene.steps(5, 0.1)
    waited = False
    for _ in range(40):
        assert scene.after(0.25) == []
        waited |= scene.hangs.all_wait
    assert waited


def test_stacks() -> None:
    assert waits(WAITS)
    assert not waits(SLEEPS)
    assert not waits("")
    assert waits(stack("/x/torch/autograd/graph.py"))
    reads = ("/x/torch/cuda/streams.py", "/x/hetexp/hardware/backends/cuda.py")
    assert waits(stack(*reads, "/x/hetexp/comm/connections/revocation.py"))  # for NCCL's kernels
    assert not waits(stack(*reads, "/x/hetexp/training/nonfinite/grad_check.py"))  # for its own device
    deep = WAITS.replace("run_rank", "something")  # the end of a deep stack is cut off
    assert waits(deep)
    assert innermost_frame(SLEEPS) == "inner (/home/me/model.py:7)"

"""A run as its folder tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import plan_on

from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.plan import Plan
from hetexp.monitor.runs import Modelled, RunWatch

FAST, SLOW = (
    DeviceSpec(f"emulated:{place}", "emulated", place, name, "nvidia", memory_bytes=24 * GIB)
    for place, name in enumerate(("RTX 3090 (emulated)", "T4 (emulated)"))
)
CONFIG = {"trainer": {"global_batch_size": 64}, "fault": {"events": []}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(folder: Path, **changes: Any) -> Plan:
    return plan_on([FAST, SLOW], CONFIG, run_dir=str(folder), **changes)


def line(step: int, shares: tuple[float, float] = (0.75, 0.25), **more: Any) -> str:
    told: dict[str, Any] = {
        "step": step,
        "train/loss": 0.5,
        "samples_per_second": 100.0,
        "step_seconds": 0.64,
    }
    for place, share in enumerate(shares):
        told[f"device/emulated:{place}/share"] = share
        told[f"device/emulated:{place}/samples_per_second"] = 150.0 if share else None
    return json.dumps({**told, "device/emulated:0/peak_memory_gib": 1.5, **more}) + "\n"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(tmp_path: Path, clock: Clock) -> RunWatch:
    return RunWatch(tmp_path, clock)


def test_there_may_be_nothing_yet(watch: RunWatch, tmp_path: Path) -> None:
    watch.look()
    assert (watch.name, watch.devices, watch.line) == (tmp_path.name, [], {})
    (tmp_path / "plan.json").write_text("{")
    watch.look()
    assert watch.devices == []
    plan(tmp_path).write(tmp_path / "plan.json")
    watch.look()
    assert watch.name == "run"
    assert watch.devices == [(FAST, 0), (SLOW, 1)]
    assert watch.modelled(FAST) == Modelled(None, None)


def test_the_newest_line_counts(watch: RunWatch, tmp_path: Path, clock: Clock) -> None:
    plan(tmp_path).write(tmp_path / "plan.json")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line(10) + line(20) + '{"step": 20, "eval/loss": 1.0}\n' + line(30)[:20])
    watch.look()
    assert watch.line["step"] == 20
    # It computes ¾ of 100 samples a second at 150 a second.
    assert watch.modelled(FAST) == Modelled(0.5, round(1.5 * GIB))
    assert watch.modelled(SLOW) == Modelled(25 / 150, None)
    with metrics.open("a") as file:
        file.write(line(30)[20:] + line(40, (1.0, 0.0)))
    watch.look()
    assert watch.line["step"] == 40
    assert watch.modelled(SLOW) == Modelled(0.0, None)  # without a share it does nothing, which is known
    metrics.write_text(line(5))  # begun anew
    watch.look()
    assert watch.line["step"] == 5
    clock.now += 60
    assert watch.modelled(FAST) == Modelled(None, round(1.5 * GIB))  # it is silent
    watch.close()


def test_a_slow_run_is_not_silent(watch: RunWatch, tmp_path: Path, clock: Clock) -> None:
    plan(tmp_path).write(tmp_path / "plan.json")
    metrics = tmp_path / "metrics.jsonl"
    for step in range(3):
        with metrics.open("a") as file:
            file.write(line(step))
        clock.now += 30
        watch.look()
    clock.now += 60
    assert watch.modelled(FAST).utilisation == 0.5
    clock.now += 60
    assert watch.modelled(FAST).utilisation is None
    watch.close()


def test_of_several_pipelines_nobody_tells_how_busy_they_are(watch: RunWatch, tmp_path: Path) -> None:
    plan(tmp_path, replica_batch_sizes=(32, 32)).write(tmp_path / "plan.json")
    (tmp_path / "metrics.jsonl").write_text(line(10))
    watch.look()
    assert watch.modelled(FAST).utilisation is None
    watch.close()


def test_a_change_of_membership_changes_the_devices(watch: RunWatch, tmp_path: Path) -> None:
    whole = plan(tmp_path)
    whole.write(tmp_path / "plan.json")
    watch.look()
    (tmp_path / "plans").mkdir()
    for number in (9, 10):
        only = whole.of_ranks([1], name=f"epoch {number}", shares=(1.0,), local_batch_sizes=(4,))
        only.write(tmp_path / "plans" / f"epoch_{number}.json")
    watch.look()
    assert watch.devices == [(SLOW, 0)]
    assert watch.plan is not None
    assert watch.plan.name == "epoch 10"


def test_one_rank_may_drive_several_devices(watch: RunWatch, tmp_path: Path) -> None:
    whole = plan_on([FAST], CONFIG, run_dir=str(tmp_path), cards=(FAST, SLOW), card_shares=(0.5, 0.5))
    whole.write(tmp_path / "plan.json")
    watch.look()
    assert watch.devices == [(FAST, 0), (SLOW, 0)]

"""The store: the same answers from SQLite and PostgreSQL."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `monitor` is not installed")

from sqlalchemy import CursorResult, func, select

from hetexp.core.config import RetentionConfig
from hetexp.core.device import GIB
from hetexp.core.errors import SetupError
from hetexp.monitor.history import View
from hetexp.monitor.processes import started_at
from hetexp.monitor.sample import Device, Sample, User, host_name
from hetexp.monitor.store import ABANDONED, Store
from hetexp.monitor.tables import about, device_metrics

HERE = host_name()
START = 1_700_000_040.0
VIEWS: tuple[tuple[View, int], ...] = (("aggregated", 600), ("per_gpu", 8 * 600))
"""And their points of an hour."""


def card(number: int, backend: str = "cuda") -> Device:
    name = f"{backend}:{number}"
    return Device(f"{HERE}/{name}", HERE, name, number, "H200", "nvidia", backend, uuid=f"GPU-{number}")


CPU = Device(f"{HERE}/cpu", HERE, "cpu", None, "Xeon", "cpu", "cpu")
FULL = Sample(
    card(0),
    utilisation=0.5,
    memory_used_bytes=60 * GIB,
    memory_total_bytes=141 * GIB,
    temperature_celsius=61.0,
    power_watts=400.5,
    power_limit_watts=700.0,
    clock_mhz=1980.0,
    memory_clock_mhz=3201.0,
    fan=0.25,
    fan_rpm=1200.0,
    throttled=("power cap",),
    users=(User("run-a", 0), User("run-b")),
)
TRAINING = {
    "id": "run-a",
    "name": "hardware=nvidia",
    "state": "pending",
    "gpu_ids": ["cuda:0", "cuda:1"],
    "distributed": True,
    "emulated": False,
    "strategy": "ddp",
    "run_dir": "/runs/a",
    "host": HERE,
    "created": START,
}


class TestSamples:
    def test_come_back_as_they_were(self, store: Store) -> None:
        store.write([FULL, Sample(card(1))], START)
        first, second = store.latest()
        told = {name: first[name] for name in Sample.__dataclass_fields__ if name not in ("device", "users")}
        expected = {name: getattr(FULL, name) for name in told} | {"throttled": ["power cap"]}
        assert told == expected
        assert first["users"] == [{"run": "run-a", "rank": 0}, {"run": "run-b", "rank": None}]
        assert (first["time"], first["device"], first["uuid"], first["key"]) == (
            START,
            "cuda:0",
            "GPU-0",
            card(0).key,
        )
        # What is not told is null, not 0.
        values = set(Sample.__dataclass_fields__) - {"device", "state", "users"}
        assert {name for name in values if second[name] is None} == values

    def test_a_moment_has_one_sample_of_a_device(self, store: Store) -> None:
        store.write([FULL], START)
        store.write([replace(FULL, utilisation=0.9), replace(FULL, device=card(1))], START)
        assert [row["utilisation"] for row in store.latest()] == [0.5, 0.5]

    def test_a_lost_card_keeps_its_place(self, store: Store) -> None:
        store.write([FULL, replace(FULL, device=card(1))], START)
        store.write([Sample(card(0), "lost", "GPU is lost"), replace(FULL, device=card(1))], START + 1)
        lost, other = store.latest()
        assert (lost["state"], lost["reason"], lost["utilisation"]) == ("lost", "GPU is lost", None)
        assert (other["state"], other["utilisation"]) == ("ok", 0.5)

    def test_facts_of_a_device_may_change(self, store: Store) -> None:
        store.write([FULL], START)
        store.write([replace(FULL, device=replace(card(0), number=3))], START + 1)
        assert [row["number"] for row in store.latest()] == [3]

    def test_devices_that_are_gone_can_be_left_out(self, store: Store) -> None:
        store.write([FULL], START)
        store.write([replace(FULL, device=card(1))], START + 100)
        assert [row["device"] for row in store.latest(START + 50)] == ["cuda:1"]


class TestHistory:
    @pytest.fixture
    def filled(self, store: Store) -> Store:
        for second in range(60):
            busy = replace(FULL, utilisation=second / 100, memory_used_bytes=second)
            quiet = replace(FULL, device=card(1), utilisation=None, power_watts=None)
            store.write([busy, quiet, replace(FULL, device=CPU, utilisation=1.0)], START + second)
        return store

    def test_of_each_device(self, filled: Store) -> None:
        first, second, cpu = filled.history(START, START + 60, "per_gpu", max_points=60)
        assert (first.device, second.device, cpu.device) == ("cuda:0", "cuda:1", "cpu")
        assert first.times == [START + k for k in range(60)]
        assert first.values["utilisation"] == [k / 100 for k in range(60)]
        assert second.values["utilisation"] == [None] * 60

    def test_is_averaged_to_few_points(self, filled: Store) -> None:
        (first,) = filled.history(START, START + 60, "per_gpu", max_points=6, keys=[card(0).key])
        assert first.times == [START + 10 * k for k in range(6)]
        assert first.values["utilisation"] == pytest.approx([0.045 + 0.1 * k for k in range(6)])

    def test_together(self, filled: Store) -> None:
        (together,) = filled.history(START, START + 60, max_points=60)
        assert together.key is None
        # Means are over those that tell, sums too; the processor is left out beside cards.
        assert together.values["utilisation"][50] == pytest.approx(0.5)
        assert together.values["power_watts"][50] == pytest.approx(400.5)
        assert together.values["memory_used_bytes"][50] == 60 * GIB + 50
        assert together.values["memory_total_bytes"][50] == 2 * 141 * GIB
        assert together.values["temperature_celsius"][50] == 61.0

    def test_a_processor_alone_is_shown(self, store: Store) -> None:
        store.write([replace(FULL, device=CPU)], START)
        (together,) = store.history(START, START + 10, max_points=10)
        assert together.values["utilisation"] == [0.5]

    def test_an_hour_of_eight_devices_is_averaged_by_the_database(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The rows that come into this process are the points, and not 28,800 samples."""
        store.write([replace(FULL, device=card(number)) for number in range(8)], START)
        row = {"level": 0, "state": "ok", "users": [], "utilisation": 0.5, "power_watts": 400.0}
        hour = [
            {**row, "device_id": one["id"], "time_ms": round((START + second) * 1000)}
            for one in store.latest()
            for second in range(1, 3600)
        ]
        with store.engine.begin() as connection:
            connection.execute(device_metrics.insert(), hour)
        counts: list[int] = []
        fetched = CursorResult.all

        def counted(result: CursorResult[Any]) -> Any:
            rows = fetched(result)
            counts.append(len(rows))
            return rows

        monkeypatch.setattr(CursorResult, "all", counted)
        for view, points in VIEWS:
            counts.clear()
            history = store.history(START, START + 3600, view)
            assert sum(len(one.times) for one in history) == points
            assert counts == [8, points]  # the devices, then their points

    def test_of_no_time_is_empty(self, filled: Store) -> None:
        assert filled.history(START + 60, START + 60) == []
        assert filled.history(START - 100, START - 50, "per_gpu") == []
        (together,) = filled.history(START - 100, START - 50)
        assert together.times == []


class TestRetention:
    KEEP = RetentionConfig(raw_hours=1.0, ten_seconds_days=1.0, minutes_days=30.0)

    def rows(self, store: Store) -> int:
        with store.engine.connect() as connection:
            return int(connection.scalar(select(func.count()).select_from(device_metrics)) or 0)

    def test_seconds_become_tens_and_minutes_and_go(self, store: Store) -> None:
        for second in range(120):
            told = second / 100 if second % 10 else None
            reasons = ("too hot",) if second == 5 else ()
            store.write([replace(FULL, utilisation=told, throttled=reasons)], START + second)
        assert self.rows(store) == 120
        now = START + 3600 + 60
        assert store.roll_up(self.KEEP, now) == 60
        assert self.rows(store) == 66
        (first,) = store.history(START, START + 60, "per_gpu", max_points=6)
        assert first.values["utilisation"] == pytest.approx([0.05 + 0.1 * k for k in range(6)])
        assert store.roll_up(self.KEEP, now) == 0  # nothing twice
        store.roll_up(self.KEEP, START + 86400 + 120)
        store.roll_up(self.KEEP, START + 86400 + 120)
        assert self.rows(store) == 2
        (row,) = store.latest()
        assert row["throttled"] == []  # of the second minute
        store.roll_up(self.KEEP, START + 31 * 86400)
        assert self.rows(store) == 0

    def test_reasons_and_losses_are_kept_in_means(self, store: Store) -> None:
        for second in range(10):
            lost = second == 3
            store.write(
                [
                    Sample(card(0), "lost", "off the bus")
                    if lost
                    else replace(FULL, users=(User("a", second % 2),))
                ],
                START + second,
            )
        store.roll_up(self.KEEP, START + 3600 + 60)
        (row,) = store.latest()
        assert (row["state"], row["reason"], row["throttled"]) == ("lost", "off the bus", ["power cap"])
        assert row["users"] == [{"rank": 0, "run": "a"}, {"rank": 1, "run": "a"}]
        assert row["utilisation"] == 0.5

    def test_a_sample_that_comes_late_does_no_harm(self, store: Store) -> None:
        for second in range(10):
            store.write([FULL], START + second)
        store.roll_up(self.KEEP, START + 3600 + 60)
        store.write([replace(FULL, utilisation=1.0)], START + 4)
        store.roll_up(self.KEEP, START + 3600 + 60)
        (first,) = store.history(START, START + 10, "per_gpu", max_points=1)
        assert first.values["utilisation"] == [0.5]

    def test_another_hosts_samples_are_its_own(self, store: Store) -> None:
        store.write([replace(FULL, device=replace(card(0), key="x", host="elsewhere"))], START)
        assert store.roll_up(self.KEEP, START + 40 * 86400) == 0
        assert self.rows(store) == 1

    def test_emulated_devices_go_with_their_samples(self, store: Store) -> None:
        mine = replace(card(0, "emulated"), key="old", emulated=True, run_id="run-a")
        store.write([replace(FULL, device=mine)], START)
        for _ in range(3):
            store.roll_up(self.KEEP, START + 40 * 86400)
        assert store.history(0, START + 1e6, "per_gpu") == []
        fresh = Store(str(store.url))
        fresh.write([replace(FULL, device=mine)], START + 41 * 86400)
        assert len(fresh.latest()) == 1
        fresh.close()


class TestTrainings:
    def test_go_through_their_states(self, store: Store) -> None:
        store.begin(TRAINING)
        (row,) = store.trainings()
        assert {name: row[name] for name in TRAINING} == TRAINING
        assert (row["progress"], row["error"], row["started"]) == (None, None, None)
        store.update("run-a", state="running", step=5, steps=10, progress=0.5, started=START + 1)
        assert [one["id"] for one in store.trainings(["running"], HERE)] == ["run-a"]
        store.update("run-a", state="failed", error="rank 0 failed", ended=START + 2)
        assert store.trainings(["running"]) == []
        ended = store.training("run-a")
        assert ended is not None
        assert (ended["error"], ended["progress"]) == ("rank 0 failed", 0.5)
        assert store.training("run-x") is None

    def test_a_run_may_begin_anew(self, store: Store) -> None:
        store.begin(TRAINING)
        store.update("run-a", state="stopped", progress=0.5, ended=START)
        store.begin({**TRAINING, "created": START + 100})
        (row,) = store.trainings()
        assert (row["state"], row["progress"], row["ended"], row["created"]) == ("pending", None, None, START)

    def test_the_newest_come_first(self, store: Store) -> None:
        for place in range(3):
            store.begin({**TRAINING, "id": f"run-{place}", "created": START + place})
        assert [one["id"] for one in store.trainings(limit=2)] == ["run-2", "run-1"]

    def test_those_whose_launcher_is_gone_have_failed(self, store: Store) -> None:
        mine = {"pid": os.getpid(), "process_mark": started_at(os.getpid())}
        store.begin({**TRAINING, "id": "alive", **mine})
        store.begin({**TRAINING, "id": "killed", "pid": os.getpid(), "process_mark": "another process's"})
        store.begin({**TRAINING, "id": "elsewhere", "host": "other", "pid": 1, "process_mark": "x"})
        before = time.time()
        assert store.bury() == ["killed"]
        (row,) = store.trainings(["failed"])
        assert (row["id"], row["error"]) == ("killed", ABANDONED)
        assert row["ended"] >= before
        assert store.bury() == []


def test_tables_of_a_newer_version_are_refused(store: Store) -> None:
    with store.engine.begin() as connection:
        connection.execute(about.update().values(version=99))
    with pytest.raises(SetupError, match=r"version 99.*monitor\.url"):
        Store(str(store.url))

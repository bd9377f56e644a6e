"""A run leaves samples of its devices and a row of its own, whatever it ends of."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launched import TINY, Launched, wait_for
from support import Train

pytest.importorskip("sqlalchemy", reason="the extra `monitor` is not installed")

from hetexp.monitor.store import ABANDONED, Store

MONITORED = ("monitor=default", "monitor.interval_seconds=0.2")
EMULATED = (
    *(word for word in TINY if not word.startswith(("hardware.devices", "monitor="))),
    *MONITORED,
    "hardware.devices=[emulated:rtx_3090,emulated:arc_a770]",
    "hardware.time_scale=2000",
    "trainer.max_steps=100000",
)


def test_a_run_is_sampled_until_its_launcher_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the launcher is the hardest end: the process beside it tells it, and ends, too."""
    database = tmp_path / "monitor.sqlite"
    run = Launched(tmp_path / "run", *EMULATED, f"monitor.url=sqlite:///{database}")
    try:
        wait_for(database.exists, "the database")
        store = Store(f"sqlite:///{database}")
        (going,) = wait_for(lambda: store.trainings(["running"]), "the run is told")
        assert going["gpu_ids"] == ["emulated:0", "emulated:1"]
        assert (going["steps"], going["pid"]) == (100_000, run.process.pid)

        def sampled() -> bool:
            rows = [one for one in store.latest() if one["emulated"]]
            return len(rows) == 2 and all(one["utilisation"] is not None for one in rows)

        wait_for(sampled, "samples of both devices")
        for place, row in enumerate(one for one in store.latest() if one["emulated"]):
            assert row["device"] == f"emulated:{place}"
            assert row["users"] == [{"run": going["id"], "rank": place}]
            assert 0 < row["utilisation"] <= 1
            assert row["memory_used_bytes"] > 0
            assert row["temperature_celsius"] is None
        wait_for(lambda: (store.trainings()[0]["progress"] or 0) > 0, "its progress")
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        (ended,) = wait_for(lambda: store.trainings(["failed"]), "its end")
        assert ended["error"] == ABANDONED
        wait_for(lambda: not run.processes(), "the end of all its processes")
        (series,) = store.history(going["created"], ended["ended"], max_points=1000)
        assert len(series.times) >= 2
        store.close()
    finally:
        run.kill()


def test_a_completed_run_and_one_without_a_monitor(train: Train, tmp_path: Path) -> None:
    database = tmp_path / "monitor.sqlite"
    words = (
        "hardware.devices=[cpu]",
        "strategy=single",
        "model=mlp",
        "data=synthetic",
        "data.num_samples=64",
        "trainer.max_epochs=null",
        "trainer.max_steps=3",
        "trainer.log_every=1",
        f"monitor.url=sqlite:///{database}",
    )
    train(*words)
    assert not database.exists()
    run = train(*words, "monitor=default")
    store = Store(f"sqlite:///{database}")
    (row,) = store.trainings()
    store.close()
    assert (row["state"], row["step"], row["steps"], row["progress"]) == ("completed", 3, 3, 1.0)
    assert row["run_dir"] == str(run.folder)
    assert not (run.folder / "logs" / "monitor.log").exists()  # nothing went wrong

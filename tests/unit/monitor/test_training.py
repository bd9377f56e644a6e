"""One run's row, from its start to its end, and the process that tells it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run

pytest.importorskip("sqlalchemy", reason="the extra `monitor` is not installed")

from hetexp.core.config import MonitorConfig
from hetexp.core.plan import Plan
from hetexp.monitor.sample import Sample
from hetexp.monitor.service import Service, any_sampler, lock_path
from hetexp.monitor.store import ABANDONED, Store
from hetexp.monitor.training import Training


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'monitor.sqlite'}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").rename(tmp_path / "summary.json")  # it is not over yet
    return folder


def begun(folder: Path, created: float | None = None) -> Training:
    return Training(Plan.read(folder / "plan.json"), os.getpid(), created or time.time())


def row(store: Store) -> dict[str, Any]:
    (one,) = store.trainings()
    return one


def ended(folder: Path, **values: Any) -> None:
    summary = json.loads((folder.parent / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, **values}))


def test_from_its_start_to_its_end(store: Store, folder: Path) -> None:
    training = begun(folder)
    training.record(store)
    assert row(store)["state"] == "pending"
    assert row(store)["gpu_ids"] == ["emulated:0", "emulated:1"]
    assert (row(store)["distributed"], row(store)["emulated"], row(store)["pid"]) == (True, True, os.getpid())
    training.ready(8)
    training.record(store)
    now = row(store)
    assert (now["state"], now["step"], now["steps"], now["progress"]) == ("running", 4, 8, 0.5)
    assert now["started"] is not None
    ended(folder, status="completed")
    training.finish()
    training.record(store)
    now = row(store)
    assert (now["state"], now["progress"], now["error"]) == ("completed", 1.0, None)
    assert now["ended"] >= now["started"] >= now["created"]


@pytest.mark.parametrize(("status", "state"), [("failed", "failed"), ("interrupted", "stopped")])
def test_an_end_before_the_last_step(store: Store, folder: Path, status: str, state: str) -> None:
    training = begun(folder)
    training.ready(8)
    ended(folder, status=status, error="rank 1 failed")
    training.finish()
    training.record(store)
    assert (row(store)["state"], row(store)["error"], row(store)["progress"]) == (state, "rank 1 failed", 0.5)


def test_a_launcher_that_was_killed(store: Store, folder: Path) -> None:
    training = begun(folder)
    training.finish()
    training.record(store)
    assert (row(store)["state"], row(store)["error"]) == ("failed", ABANDONED)


def test_a_run_that_never_began_says_why(store: Store, folder: Path) -> None:
    training = begun(folder)
    training.ended_itself, training.error = True, "Rank 0 cannot be started: no such file."
    training.finish()
    training.record(store)
    assert (row(store)["state"], row(store)["error"]) == ("failed", training.error)


def test_the_summary_of_an_earlier_run_in_the_folder_is_not_its_own(store: Store, folder: Path) -> None:
    ended(folder, status="completed")
    os.utime(folder / "summary.json", (1e9, 1e9))
    training = begun(folder)
    training.finish()
    training.record(store)
    assert row(store)["state"] == "failed"


@pytest.mark.parametrize("loss", ["NaN", "Infinity"])
def test_a_loss_that_is_no_number_is_null(store: Store, folder: Path, loss: str) -> None:
    text = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    (folder / "metrics.jsonl").write_text(json.dumps({**text, "train/loss": float(loss)}) + "\n")
    training = begun(folder)
    training.ready(0)
    training.record(store)
    assert (row(store)["loss"], row(store)["progress"], row(store)["step"]) == (None, None, 4)
    training.finish()


class TestService:
    def config(self, url: str) -> MonitorConfig:
        return MonitorConfig(interval_seconds=0.1, url=url)

    def started(self, service: Service) -> tuple[threading.Thread, threading.Event]:
        ending = threading.Event()
        thread = threading.Thread(target=service.run, args=(ending,))
        thread.start()
        return thread, ending

    def test_a_lock_that_cannot_be_opened_is_another_users(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'theirs.sqlite'}"
        lock_path(url).symlink_to(tmp_path / "elsewhere")
        assert any_sampler(url)
        assert not (tmp_path / "elsewhere").exists()

    def test_samples_until_it_is_told_to_end(self, url: str, store: Store, folder: Path) -> None:
        seen: list[tuple[float, Sequence[Sample]]] = []
        enough = threading.Event()

        def see(moment: float, samples: Sequence[Sample]) -> None:
            seen.append((moment, samples))
            if len(seen) >= 3:
                enough.set()

        thread, ending = self.started(Service(self.config(url), begun(folder), see))
        assert enough.wait(20)
        assert any_sampler(url)
        ending.set()
        thread.join(10)
        assert not any_sampler(url)
        moments = [moment for moment, _ in seen]
        assert all(round(moment * 10, 6) == round(moment * 10) for moment in moments)  # multiples of 0.1 s
        names = [one["device"] for one in store.latest()]
        assert names == ["cpu", "emulated:0", "emulated:1"]  # the run's devices, too
        assert row(store)["state"] == "failed"  # it told no end

    def test_one_of_a_machine_samples_for_all_and_the_next_takes_over(self, url: str, store: Store) -> None:
        first_seen, second_seen = threading.Event(), threading.Event()
        first = self.started(Service(self.config(url), seen=lambda *_: first_seen.set()))
        assert first_seen.wait(20)
        second = self.started(Service(self.config(url), seen=lambda *_: second_seen.set()))
        assert not second_seen.wait(0.5)
        first[1].set()
        first[0].join(10)
        assert second_seen.wait(20)
        second[1].set()
        second[0].join(10)

    def test_a_database_that_cannot_be_reached_is_tried_again(
        self, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hetexp.monitor.service.AGAIN_SECONDS", 0.1)
        (tmp_path / "monitor.sqlite").mkdir()
        seen = threading.Event()
        thread, ending = self.started(Service(self.config(url), seen=lambda *_: seen.set()))
        for _ in range(200):
            if caplog.records:
                break
            seen.wait(0.05)
        (tmp_path / "monitor.sqlite").rmdir()
        assert seen.wait(20)
        ending.set()
        thread.join(10)
        assert len(caplog.records) == 1  # once, not each time

    def test_databases_have_locks_of_their_own(self, url: str, tmp_path: Path, hetexp_home: Path) -> None:
        others = [None, "postgresql://me@host/one", "postgresql://me@host/two"]
        assert lock_path(url) == tmp_path / "monitor.sqlite.lock"
        assert len({lock_path(other) for other in others}) == 3
        assert all(lock_path(other).parent == hetexp_home for other in others)

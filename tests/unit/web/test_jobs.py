"""Jobs: one at a time on a device, found again by their locks, ended as they are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")

from hetexp.app import compose_config
from hetexp.core.files import write_json
from hetexp.monitor.store import Store
from hetexp.web import job as job_module
from hetexp.web.job import Card, Job, alive, log_tail, read_job
from hetexp.web.jobs import FOREIGN, Jobs
from hetexp.web.refused import RefusedError

WILLING = "import signal, time; print('here', flush=True); time.sleep(60)"
STUBBORN = WILLING.replace("time;", "time; signal.signal(signal.SIGTERM, signal.SIG_IGN);")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The queue with a launcher that does what the job's only word says, and what it told."""
    own = sys.executable

    def started(command: list[str], **given: Any) -> subprocess.Popen[bytes]:
        return real([own, "-c", command[4]] if "hetexp.cli" in command else command, **given)

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", started)
    store = Store(f"sqlite:///{tmp_path / 'lab.sqlite'}")
    sent: list[dict[str, Any]] = []
    made = Jobs(store, sent.append, tmp_path, stop_seconds=0.5)
    made.told, made.store = sent, store  # type: ignore[attr-defined]
    yield made
    for row in store.trainings():
        if row["pid"] is not None and alive(Path(row["run_dir"])):
            os.killpg(row["pid"], signal.SIGKILL)
    for process in made._processes.values():
        process.wait()
    store.close()


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(
        name: str, word: str = WILLING, gpu_ids: tuple[str, ...] = ("emulated:t4",), **given: Any
    ) -> Job:
        return Job(name, str(tmp_path), f"outputs/{name}", (word,), name, None, gpu_ids, (), **given)

    return make


def until(jobs: Any, name: str, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        jobs.look()
        row: dict[str, Any] = jobs.store.training(name)
        if row["state"] == state:
            return row
        time.sleep(0.02)
    raise AssertionError(row)


def ready(jobs: Any, name: str) -> dict[str, Any]:
    """Start a job, and return its row when its process does what it should."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        jobs.look()
        row: dict[str, Any] = jobs.store.training(name)
        if log_tail(Path(row["run_dir"]), 1) == ["here"]:
            return row
        time.sleep(0.02)
    raise AssertionError("it did not start")


def test_devices_serve_one_at_a_time_in_order(jobs: Any, job: Any) -> None:
    card = (Card("cuda:0", "cuda", "GPU-that-nobody-has"),)
    for one in (job("a"), job("b"), job("c", gpu_ids=("cuda:0",)), job("d", gpu_ids=("cuda:0", "cpu"))):
        jobs.add(replace(one, cards=card if "cuda:0" in one.gpu_ids else ()), "ddp", True)
    ready(jobs, "a")
    ready(jobs, "c")  # its card is free
    assert jobs.waits_for("b") == ["this machine's processor, which a uses"]
    assert jobs.waits_for("d") == [
        "cuda:0, which c uses",
        "this machine's processor, which a uses",
    ]
    jobs.stop(jobs.store.training("a"))
    assert until(jobs, "a", "stopped")["error"] is None
    ready(jobs, "b")  # before d, which asked later
    assert jobs.waits_for("d")[1] == "this machine's processor, which b uses"
    assert {one["id"] for one in jobs.told} == {"a", "b", "c", "d"}


def test_a_later_server_finds_a_training_by_its_lock(jobs: Any, job: Any, tmp_path: Path) -> None:
    jobs.add(job("a"), "ddp", True)
    ready(jobs, "a")
    jobs.store.update("a", pid=None, process_mark=None)  # killed before it could write them
    later = Jobs(jobs.store, jobs.told.append, tmp_path)
    later.look()
    assert not later._processes and alive(Path(jobs.store.training("a")["run_dir"]))
    with pytest.raises(RefusedError, match="has not ended"):
        later.delete(jobs.store.training("a"))
    (process,) = jobs._processes.values()
    process.kill()
    process.wait()
    later.look()
    row = jobs.store.training("a")
    assert (row["state"], row["error"]) == ("failed", "here")  # what it said last


def test_a_training_that_ends_without_a_server_is_read_from_its_summary(
    jobs: Any, job: Any, tmp_path: Path
) -> None:
    jobs.add(job("a"), "ddp", True)
    ready(jobs, "a")
    folder = Path(jobs.store.training("a")["run_dir"])
    write_json(folder / "summary.json", {"status": "completed", "error": None})
    (process,) = jobs._processes.values()
    process.kill()
    process.wait()
    Jobs(jobs.store, jobs.told.append, tmp_path).look()
    row = jobs.store.training("a")
    assert (row["state"], row["progress"]) == ("completed", 1.0)


def test_one_that_does_not_end_is_killed(jobs: Any, job: Any) -> None:
    jobs.add(job("a", STUBBORN), "ddp", True)
    ready(jobs, "a")
    jobs.stop(jobs.store.training("a"))
    assert until(jobs, "a", "stopped")["error"] is None
    assert not alive(Path(jobs.store.training("a")["run_dir"]))


def test_errors_before_a_plan_are_told(jobs: Any, job: Any) -> None:
    jobs.add(job("a", "raise SystemExit('Configuration error: `x` must be 1.')"), "ddp", True)
    assert until(jobs, "a", "failed")["error"] == "Configuration error: `x` must be 1."
    with pytest.raises(RefusedError, match="has ended already"):
        jobs.stop(jobs.store.training("a"))
    jobs.delete(jobs.store.training("a"))
    assert jobs.store.training("a") is None


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder be another user's than the server."""
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 65534)


@pytest.mark.parametrize("where", ["elsewhere", "a link", "another id", "no folder", "another user", "note"])
def test_a_row_of_the_database_starts_no_code(
    where: str, jobs: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write the database, and name any folder there: nothing in it is executed."""
    started = tmp_path / "started"
    planted = job("planted", f"open({str(started)!r}, 'w')")
    if where in ("elsewhere", "a link"):
        planted = replace(planted, root=str(tmp_path / "theirs"))
    jobs.add(planted, "ddp", True)
    folder = planted.run_dir
    if where == "a link":
        folder = tmp_path / "outputs" / "link"
        folder.parent.mkdir()
        folder.symlink_to(planted.run_dir)
    elif where == "another id":
        replace(planted, id="other").write()
    elif where == "no folder":
        folder = tmp_path / "outputs" / "none\0"
    elif where != "elsewhere":
        given_away(folder / "job.json" if where == "note" else folder, monkeypatch)
    jobs.store.update("planted", run_dir=str(folder))
    for _ in range(3):
        jobs.look()
    assert jobs.waits_for("planted") == [FOREIGN]
    jobs.stop(jobs.store.training("planted"))
    assert jobs.store.training("planted")["state"] == "stopped"
    jobs.look()
    assert not jobs._processes and not started.exists() and not (planted.run_dir / job_module.LOCK).exists()


def test_two_servers_start_a_training_once(jobs: Any, job: Any) -> None:
    made = job("a")
    made.write()
    first, second = job_module.launch(made), job_module.launch(made)
    assert first is not None and second is None
    first.kill()
    first.wait()


def test_notes_come_back(job: Any, tmp_path: Path) -> None:
    made = job("a", overrides={"trainer.max_steps": 3}, experiment="gpt_text")
    made = replace(made, cards=(Card("cuda:0", "cuda", "GPU-1"),))
    made.write()
    assert read_job(made.run_dir) == made
    assert read_job(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["plain", "a'b", "back\\slash", "end\\", "q\\'", "sqlite:////tmp/a b/x.sqlite"]
)
def test_texts_reach_hydra_as_they_are(text: str) -> None:
    assert compose_config([f"name={job_module._quoted(text)}"]).name == text


def test_tails_are_short_and_plain(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lines = "".join(f"{number} \x1b[31mred\n" for number in range(20_000))
    (tmp_path / "logs" / "rank_0.log").write_text(lines)
    assert log_tail(tmp_path, 2) == ["19998 [31mred", "19999 [31mred"]
    assert sum(map(len, log_tail(tmp_path, 10**6))) < 64 * 1024


def test_the_server_keeps_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEXP_DASHBOARD_TOKEN", "secret")
    assert "HETEXP_DASHBOARD_TOKEN" not in job_module.environment()

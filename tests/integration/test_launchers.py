"""Sweeps by Hydra's launchers, whose jobs run at the same time and in processes of the launcher's own."""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Launched, wait_for
from own_project import write_project

Start = Callable[..., Launched]
LAUNCHERS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a sweep in a project of one's own, with its own options and modules."""
    started = []

    def begin(launcher: str, *overrides: str) -> Launched:
        plugin = f"hydra_plugins.{LAUNCHERS[launcher]}"
        if importlib.util.find_spec(plugin) is None:
            pytest.skip(f"{plugin} is not installed: pip install 'hetexp[launchers]'")
        folder = write_project(tmp_path / launcher)
        quick = ("diagram=false", "sweep.report=false", "sweep.share_cpu=true")  # which no test here is about
        options = ("-m", f"hydra/launcher={launcher}", "experiment=mine", *quick, *overrides)
        started.append(Launched(folder, *options, run_dir=folder / "outputs"))
        return started[-1]

    yield begin
    try:
        wait_for(lambda: not any(one.processes() for one in started), "the end of all processes", 20)
    finally:
        for one in started:
            one.kill()


def job_folders(run: Launched, count: int) -> list[Path]:
    (sweep,) = run.run_dir.glob("sweeps/*/*")
    folders = sorted(folder for folder in sweep.iterdir() if folder.name.isdigit())
    assert [folder.name for folder in folders] == [str(number) for number in range(count)]
    return folders


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_jobs(start: Start, launcher: str) -> None:
    run = start(launcher, "trainer.seed=0,1", "launch.start_method=forkserver")
    assert run.wait() == 0, run.screen
    folders = job_folders(run, 2)
    for seed, folder in enumerate(folders):
        summary, plan = read(folder / "summary.json"), read(folder / "plan.json")
        assert (summary["status"], summary["seed"], summary["world_size"]) == ("completed", seed, 2)
        assert plan["config"]["model"] == {"_target_": "my_net.Net", "hidden": 16}
        assert plan["working_dir"] == str(run.run_dir.parent)
        assert plan["group"] == folder.parent.name


def test_one_job_is_refused(start: Start) -> None:
    """The other one is completed, and the exit code and the screen tell of the first."""
    run = start("joblib", "optimizer.lr=-1,0.1", "launch.start_method=forkserver")
    assert run.wait() == 1, run.screen
    refused, completed = job_folders(run, 2)
    assert not (refused / "plan.json").exists()
    assert read(completed / "summary.json")["status"] == "completed"
    assert "`optimizer`: Invalid learning rate: -1" in run.screen


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_jobs_end_with_their_sweep(start: Start, number: signal.Signals) -> None:
    """Joblib's workers do not learn that the sweep was killed, and would train on."""
    endless = ("trainer.max_steps=100000000", "trainer.log_every=1")
    run = start("joblib", *endless, "trainer.seed=0,1", "hydra.launcher.n_jobs=2")

    def trains() -> bool:
        assert run.process.poll() is None, run.screen
        return sum("train/loss" in path.read_text() for path in run.run_dir.rglob("metrics.jsonl")) == 2

    wait_for(trains, "two jobs that train")
    run.process.send_signal(number)
    wait_for(lambda: not run.processes(), "the end of all processes")
    assert run.wait() == (130 if number is signal.SIGINT else -number)
    if number is not signal.SIGINT:  # joblib itself kills its workers when it is interrupted
        summaries = list(run.run_dir.rglob("summary.json"))
        assert [read(path)["status"] for path in summaries] == ["interrupted"] * 2

"""A search by Optuna: asked, run by the launcher, told; resumed from its journal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

from hetexp.core.sweep.folder import key_of
from hetexp.core.sweep.search import SearchConfig
from hydra_plugins.hetexp_optuna_sweeper import RESULTS, OptunaSweeper

PARAMS = {"balancing.weights.0": "tag(log, interval(0.5, 8))", "strategy": "ddp,local_sgd", "model": "mlp"}
WITHOUT_OPTUNA = """
import sys, time
sys.modules["optuna"] = None
from hydra._internal.utils import create_config_search_path
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
names = [one.__name__ for one in Plugins.instance().discover(Sweeper)]
assert "OptunaSweeper" in names, names
assert "torch" not in sys.modules
from hydra_plugins.hetexp_optuna_sweeper import OptunaSweeper
try:
    OptunaSweeper(1, 1, "tpe", 0, "maximize", "throughput").sweep([])
except Exception as error:
    print(type(error).__name__, error)
"""


class Launcher:
    """Runs nothing: a job's value is a known function of its overrides, written as a run would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers: list[int] = []
        self.batches: list[int] = []
        self.jobs: list[dict[str, str]] = []
        self.fail_on: dict[int, str] = {}

    def launch(self, batch: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        self.batches.append(len(batch))
        return [self.job(initial_job_idx + i, list(words)) for i, words in enumerate(batch)]

    def job(self, number: int, words: list[str]) -> JobReturn:
        self.numbers.append(number)
        chosen = dict(word.split("=", 1) for word in words)
        self.jobs.append(chosen)
        run = self.folder / str(number)
        run.mkdir()
        job = JobReturn()
        job.overrides = words
        job.hydra_cfg = OmegaConf.create({"hydra": {"runtime": {"output_dir": str(run)}}})
        job.status = JobStatus.COMPLETED
        fault = self.fail_on.get(number)
        if fault == "failed":
            job.status = JobStatus.FAILED
            job.return_value = RuntimeError("the card is gone")
            return job
        if fault == "stopped":
            raise KeyboardInterrupt
        weight = float(chosen["balancing.weights.0"])
        speed = 100 - 10 * abs(weight - 2) - (20 if chosen["strategy"] == "local_sgd" else 0)
        speed += float(chosen.get("trainer.seed", 0))
        summary = {
            "status": "completed",
            "samples_per_s": speed / 4,
            "time_scale": 4.0,
            "valid": fault is None,
        }
        summary["invalid_reason"] = fault
        (run / "summary.json").write_text(json.dumps(summary))
        return job


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def sweeper(launcher: Launcher, **settings: Any) -> OptunaSweeper:
    defaults = OmegaConf.to_container(OmegaConf.structured(SearchConfig))
    assert isinstance(defaults, dict)
    arguments: dict[str, Any] = {str(k): v for k, v in defaults.items() if k != "_target_"}
    one = OptunaSweeper(**arguments | {"params": PARAMS, "n_trials": 12} | settings)
    task = ["experiment=weights_search", "strategy=ddp,local_sgd"]
    one.config = OmegaConf.create(
        {"hydra": {"sweep": {"dir": str(launcher.folder)}, "overrides": {"task": task}}}
    )
    one.launcher = launcher  # type: ignore[assignment]
    one.hydra_context = type("Context", (), {"config_loader": None})()
    one.validate_batch_is_legal = lambda batch: None  # type: ignore[method-assign]
    return one


def results(launcher: Launcher) -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(launcher.folder / RESULTS))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def test_the_best_is_found_written_and_told(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    sweeper(launcher, n_trials=30).sweep(["trainer.max_steps=5"])
    found = results(launcher)
    assert found["num_trials"] == 30
    assert found["trials"] == {"complete": 30}
    values = [100 - 10 * abs(float(job["balancing.weights.0"]) - 2) for job in launcher.jobs]
    ddp = [v for v, job in zip(values, launcher.jobs, strict=True) if job["strategy"] == "ddp"]
    assert found["best_value"] == pytest.approx(max(ddp))  # in modelled time: samples/s × time scale
    assert found["best_params"]["strategy"] == "ddp"
    assert found["best_value"] > 97  # the optimum is 100, at 2
    assert all(job["model"] == "mlp" and job["trainer.max_steps"] == "5" for job in launcher.jobs)
    shown = capsys.readouterr().out
    weight = found["best_params"]["balancing.weights.0"]
    assert f"experiment=weights_search balancing.weights.0={weight} strategy=ddp hydra.mode=RUN" in shown
    assert "Best of 30 trials: throughput" in shown


def test_trials_are_launched_together_and_once_a_seed(launcher: Launcher) -> None:
    sweeper(launcher, n_trials=5, n_jobs=2, seeds=[3, 5]).sweep(["strategy=ddp"])
    assert launcher.batches == [4, 4, 2]
    assert launcher.numbers == list(range(10))
    assert [job["trainer.seed"] for job in launcher.jobs] == ["3", "5"] * 5
    by_trial = [float(job["balancing.weights.0"]) for job in launcher.jobs[::2]]
    best = max(100 - 10 * abs(weight - 2) for weight in by_trial)
    assert results(launcher)["best_value"] == pytest.approx(best + 4)  # the mean of both seeds


def test_a_search_that_was_stopped_goes_on(launcher: Launcher) -> None:
    launcher.fail_on = {3: "stopped"}
    with pytest.raises(KeyboardInterrupt):
        sweeper(launcher, n_trials=6, sampler="random").sweep([])
    assert launcher.numbers == [0, 1, 2, 3]
    sweeper(launcher, n_trials=6, sampler="random").sweep([])
    assert launcher.numbers == [0, 1, 2, 3, 4, 5]
    assert results(launcher)["trials"] == {"complete": 5, "fail": 1}
    assert len({job["balancing.weights.0"] for job in launcher.jobs}) == 6  # it does not begin again
    sweeper(launcher, n_trials=6, sampler="random").sweep([])
    assert len(launcher.numbers) == 6


def test_what_failed_or_was_outrun_counts_for_nothing(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.fail_on = {1: "failed", 2: "this machine was late"}
    with pytest.raises(CompactHydraException, match="1 of the search's runs failed.*the card is gone"):
        sweeper(launcher, n_trials=4).sweep([])
    assert results(launcher)["trials"] == {"complete": 2, "fail": 2}
    shown = capsys.readouterr().out
    assert "no result, the card is gone" in shown
    assert "no result, not valid: this machine was late" in shown
    assert "Best of 4 trials" in shown


def test_a_search_without_a_result(launcher: Launcher) -> None:
    launcher.fail_on = {0: "late", 1: "late"}
    with pytest.raises(CompactHydraException, match="No trial has a result; the last: not valid: late"):
        sweeper(launcher, n_trials=2).sweep([])
    assert results(launcher)["best_params"] == {}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"sampler": "grid"}, "`hydra.sweeper.sampler` must be tpe or random"),
        ({"params": {"strategy": "ddp"}}, "`hydra.sweeper.params` must name at least one key"),
        ({"params": {"a": "interval(2,1)"}}, "`a` must be an interval"),
        (
            {"objective": "final.speed"},
            "`hydra.sweeper.objective` must be throughput or a key of summary.json",
        ),
    ],
)
def test_wrong_settings_end_the_search_at_once(
    launcher: Launcher, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(CompactHydraException) as error:
        sweeper(launcher, **settings).sweep([])
    assert told in str(error.value)
    assert len(launcher.numbers) <= 1  # what a run's summary has is known after the first


def test_jobs_are_found_by_their_row(launcher: Launcher) -> None:
    from hetexp.core.sweep.folder import SweepRow, append_row

    class Again(Launcher):
        def job(self, number: int, words: list[str]) -> JobReturn:
            job = super().job(number, words)
            (self.folder / str(number)).rename(self.folder / f"{number}-2")
            append_row(
                self.folder, SweepRow(number, key_of(words), f"{number}-2", "completed", None, "2026", 1.0)
            )
            return job

    again = Again(launcher.folder)
    sweeper(again, n_trials=2).sweep([])
    assert results(again)["trials"] == {"complete": 2}


def test_the_plugin_loads_without_optuna_and_says_what_to_install() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_OPTUNA], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("CompactHydraException hydra/sweeper=hetexp_optuna needs Optuna")
    assert "pip install 'hetexp[search]'" in found.stdout

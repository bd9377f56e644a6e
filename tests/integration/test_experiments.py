"""Each shipped experiment runs, in a tiny form; a search finds its best and goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Launched, wait_for
from omegaconf import OmegaConf

TINY = (
    "model=mlp",
    "model.hidden_sizes=[8]",
    "data=synthetic",
    "data.num_samples=64",
    "data.num_test_samples=8",
    "trainer.max_steps=2",
    "trainer.seed=0",
    "logger=none",
    "diagram=false",
    "launch.start_method=forkserver",
)
EMULATED = ("trainer.global_batch_size=16", "hardware.time_scale=4")
EXPERIMENTS = {
    "compare_strategies": ("strategy=single,local_sgd", "balancing=equal"),
    "compare_balancing": ("balancing=equal,profiled",),
    "weights_curve": ("balancing=manual", "balancing.weights=[1,1],[3,1]"),
    "scaling": ("balancing=equal", "hardware.cards=[rtx_4090],[rtx_4090,arc_a770]"),
}
SEARCH = (
    "experiment=weights_search",
    "balancing=manual",
    "hardware=cpu",
    "hardware.devices=[cpu,cpu]",
    "trainer.global_batch_size=8,16",
)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[dict[str, Launched]]:
    runs: dict[str, Launched] = {}
    yield runs
    try:
        # The fork server ends a moment after the launcher.
        wait_for(lambda: not any(one.processes() for one in runs.values()), "the end of all processes", 10)
    finally:
        for one in runs.values():
            one.kill()


def sweep(folder: Path, *words: str) -> Launched:
    return Launched(folder, *words, *TINY, f"hydra.sweep.dir={folder / 'sweep'}", run_dir=folder / "sweep")


def summaries(run: Launched) -> list[dict[str, Any]]:
    folders = sorted(path for path in run.run_dir.iterdir() if path.is_dir())
    return [json.loads((folder / "summary.json").read_text()) for folder in folders]


def test_each_experiment_in_a_tiny_form(started: dict[str, Launched], tmp_path: Path) -> None:
    for name, words in EXPERIMENTS.items():  # without -m: an experiment says itself that it is a sweep
        started[name] = sweep(tmp_path / name, f"experiment={name}", *words, *EMULATED)
    found = {}
    for name, run in started.items():
        assert run.wait() == 0, run.screen
        found[name] = summaries(run)
        assert "Report: " in run.screen, run.screen
        assert "emulated" in (run.run_dir / "report.html").read_text()
    for name, runs in found.items():
        assert [one["status"] for one in runs] == ["completed", "completed"], name
        assert all(one["emulated"] and one["seed"] == 0 for one in runs), name
        assert all(one["fallback"] is None for one in runs), name

    alone, together = found["compare_strategies"]
    assert (alone["strategy"], together["strategy"]) == ("single", "local_sgd")
    assert [device["name"] for device in alone["devices"]] == ["RTX 3090 (emulated)"]
    assert (alone["world_size"], together["world_size"]) == (1, 2)
    assert "of 2 devices emulated:0" in " ".join(started["compare_strategies"].screen.split())
    equal, profiled = found["compare_balancing"]
    assert [device["local_batch"] for device in equal["devices"]] == [8, 8]
    assert profiled["solo_source"] == "calibration"
    splits = [[device["local_batch"] for device in one["devices"]] for one in found["weights_curve"]]
    assert splits == [[8, 8], [12, 4]]
    assert [one["world_size"] for one in found["scaling"]] == [1, 2]


def test_a_search_finds_its_best_and_goes_on(started: dict[str, Launched], tmp_path: Path) -> None:
    trials = ("hydra.sweeper.n_trials=2", "hydra.sweeper.objective=final.train_loss")
    words = (*SEARCH, "hydra.sweeper.direction=minimize")
    first = started["first"] = sweep(tmp_path, *words, *trials)
    assert first.wait() == 0, first.screen
    losses = [one["final"]["train_loss"] for one in summaries(first)]
    assert len(losses) == 2
    best = OmegaConf.load(first.run_dir / "optimization_results.yaml")
    assert best.best_value == min(losses)
    assert f"balancing.weights.0={best.best_params['balancing.weights.0']}" in first.screen

    # Two trials more, in one of two with a learning rate that is refused.
    more = ("hydra.sweeper.n_trials=4", trials[1], "optimizer.lr=-1,0.01")
    again = started["again"] = sweep(tmp_path, *words, *more)
    code = again.wait()
    results = OmegaConf.load(again.run_dir / "optimization_results.yaml")
    assert results.num_trials == 4
    failed = results.trials.get("fail", 0)
    assert code == (1 if failed else 0), again.screen
    assert "Will be refused: A trial" in again.screen
    assert sorted(path.name for path in again.run_dir.iterdir() if path.is_dir()) == ["0", "1", "2", "3"]
    done = [json.loads(path.read_text()) for path in again.run_dir.glob("*/summary.json")]
    assert len(done) == 4 - failed
    assert results.best_value == min(one["final"]["train_loss"] for one in done)

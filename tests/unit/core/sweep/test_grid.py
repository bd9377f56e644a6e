"""A sweep's jobs are composed before the first one starts, those of `hydra.sweeper.params`, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from hetexp.app import check_command_line, register_resolvers
from hetexp.core.compose.conf_folders import name_own_conf_dir
from hetexp.core.sweep import grid
from hetexp.core.sweep.grid import asks_to_sweep, compose_jobs


@pytest.fixture(autouse=True)
def own(tmp_path: Path) -> Iterator[Path]:
    """A person's folder with experiments of their own."""
    register_resolvers()
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    name_own_conf_dir(tmp_path / "conf")
    yield folder
    name_own_conf_dir(None)


def experiment(own: Path, *params: str, sweeper: str = "basic") -> None:
    lines = "".join(f"      {line}\n" for line in params)
    text = (
        f"# @package _global_\ndefaults:\n  - override /hydra/sweeper: {sweeper}\nhydra:\n  mode: MULTIRUN\n"
    )
    (own / "mine.yaml").write_text(f"{text}  sweeper:\n    params:\n{lines}")


def test_jobs_of_params_and_of_the_command_line(own: Path) -> None:
    experiment(own, "strategy: ddp,single", "trainer.seed: 0,1")
    assert asks_to_sweep(["experiment=mine"])
    assert not asks_to_sweep(["experiment=mine", "hydra.mode=RUN"])
    assert not asks_to_sweep(["trainer.seed=1"])
    jobs, problems = compose_jobs(["experiment=mine", "trainer.seed=7", "model=mlp,gpt"])
    assert not problems
    assert [job.label for job in jobs] == [
        "Job 0 (strategy=ddp model=mlp)",
        "Job 1 (strategy=ddp model=gpt)",
        "Job 2 (strategy=single model=mlp)",
        "Job 3 (strategy=single model=gpt)",
    ]
    assert {job.config.trainer.seed for job in jobs} == {7}
    assert jobs[2].config.strategy._target_ == "hetexp.strategy.single.Single"
    assert "hydra" not in jobs[0].config


def test_no_more_are_composed_than_is_quick(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MOST_JOBS", 3)
    jobs, problems = compose_jobs(["trainer.seed=range(1000)"])
    assert (len(jobs), problems) == (3, [])


def test_mistakes_in_params_are_told_before_anything_starts(own: Path) -> None:
    experiment(own, "strategy: ddp,dpp", "trainer.max_stps: 1,2", 'trainer.seed: "0,1"')
    jobs, problems = compose_jobs(["experiment=mine"])
    assert jobs == []
    assert len(problems) == 2
    for problem, parts in zip(
        problems, (("'dpp'", "`dp`"), ("`trainer.max_stps`", "`max_steps`")), strict=True
    ):
        assert all(part in problem for part in (*parts, "`hydra.sweeper.params`"))
    assert compose_jobs(["experiment=mine", "strategy=ddp"])[1] == problems[1:]  # what is typed wins


def test_a_key_that_only_some_jobs_have(own: Path) -> None:
    experiment(own, "++strategy.sync_every: 5", "strategy: local_sgd,ddp")
    jobs, problems = compose_jobs(["experiment=mine"])
    assert (len(jobs), problems) == (2, [])  # it is added, and the class of ddp refuses it
    told = check_command_line(get_args_parser().parse_args(["experiment=mine", "hardware.devices=[cpu,cpu]"]))
    assert told == []  # the other job runs


def test_what_no_job_can_run_with_ends_the_sweep_and_the_rest_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(*words: str) -> list[str]:
        return check_command_line(get_args_parser().parse_args(["-m", *words]))

    assert told("trainer.max_steps=0,1,2", "hardware=cpu") == []
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.startswith("Will be refused: Job 0 (trainer.max_steps=0): `trainer.max_steps` must be")
    problems = told("trainer.max_steps=0,-1", "hardware=cpu", "trainer.clip_norm=-1")
    assert sum(problem.startswith("`trainer.clip_norm`") for problem in problems) == 1
    starts = [problem.partition(": ")[0] for problem in problems if problem.startswith("Job ")]
    assert starts == ["Job 0 (trainer.max_steps=0)", "Job 1 (trainer.max_steps=-1)"]


def test_a_search_is_checked_by_the_ends_of_what_it_varies(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment(own, "optimizer.lr: tag(log, interval(0.001, 0.1))", "model: mlp,gpt", sweeper="hetexp_optuna")
    jobs, problems = compose_jobs(["experiment=mine"])
    assert not problems
    assert [(job.config.optimizer.lr, job.label.split(" (")[0]) for job in jobs] == [
        (0.001, "A trial"),
        (0.001, "A trial"),
        (0.1, "A trial"),
        (0.1, "A trial"),
    ]
    _, problems = compose_jobs(
        ["experiment=mine", "hydra.sweeper.n_trials=0", "optimizer.lr=interval(2,1)", "model=mlp"]
    )
    assert [problem.split("`")[1] for problem in problems] == ["hydra.sweeper.n_trials", "optimizer.lr"]
    monkeypatch.setattr(grid, "find_spec", lambda name: None)
    assert compose_jobs(["experiment=mine"]) == ([], [grid.NEEDS_OPTUNA])


def test_another_sweeper_decides_for_itself(own: Path) -> None:
    assert compose_jobs(["hydra.sweeper._target_=their.Sweeper", "strategy=ddp,single"]) == ([], [])
    assert len(compose_jobs(["hydra.sweeper._target_=their.Sweeper", "strategy=ddp,dpp"])[1]) == 1

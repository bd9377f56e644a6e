"""Cases 25 and 29: a sweep is its jobs and nothing else, and one that fails leaves the others alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import TINY, Launched, wait_for

Start = Callable[..., Launched]
TESTS = Path(__file__).parent.parent
WITHOUT_DATA = tuple(option for option in TINY if not option.startswith(("data", "model")))
DATA = (
    *WITHOUT_DATA,
    "model=mlp",
    "model.hidden_sizes=[8]",
    "data=custom",
    "data._target_=faulty.Data",
    "trainer.max_steps=2",
    "launch.start_method=forkserver",
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def begin(name: str, *overrides: str) -> Launched:
        environment = {"PYTHONPATH": str(TESTS), "WANDB_MODE": "offline"}
        # Its own folder for results, named as by default.
        one = Launched(
            tmp_path / name, *overrides, environment=environment, run_dir=tmp_path / name / "outputs"
        )
        started.append(one)
        return one

    yield begin
    try:
        # The fork server ends a moment after the launcher.
        wait_for(lambda: not any(one.processes() for one in started), "the end of all processes", 10)
    finally:
        for one in started:
            one.kill()


def jobs(run: Launched, count: int) -> list[Path]:
    """Return the folders of the only sweep, which are `count` and all that there is."""
    (sweep,) = run.run_dir.glob("sweeps/*/*")
    assert list(run.run_dir.iterdir()) == [run.run_dir / "sweeps"]
    folders = sorted(folder for folder in sweep.iterdir() if folder.is_dir())
    assert [folder.name for folder in folders] == [str(number) for number in range(count)]
    assert sorted(run.run_dir.rglob(".hydra")) == [folder / ".hydra" for folder in folders]
    return folders


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_two_jobs_of_two_ranks_on_a_relative_path(start: Start, tmp_path: Path) -> None:
    runs = {}
    for chdir in ("false", "true"):
        texts = tmp_path / chdir / "texts"
        texts.mkdir(parents=True)
        (texts / "one.txt").write_text("what a person has in a folder of their own. " * 40)
        runs[chdir] = start(
            chdir,
            "-m",
            *WITHOUT_DATA,
            "data=text",
            "data.folder=texts",
            "data.sequence_length=8",
            "model=gpt",
            "model.num_layers=1",
            "model.embedding_size=8",
            "trainer.max_steps=2",
            "launch.start_method=forkserver",
            "trainer.seed=0,1",
            f"hydra.job.chdir={chdir}",
        )
    losses = {}
    for chdir, run in runs.items():
        assert run.wait() == 0, run.screen
        folders = jobs(run, 2)
        for seed, folder in enumerate(folders):
            summary = read(folder / "summary.json")
            assert (summary["status"], summary["seed"], summary["world_size"]) == ("completed", seed, 2)
            logs = sorted(file.name for file in (folder / "logs").iterdir())
            assert logs == ["rank_0.log", "rank_1.log"]
            assert read(folder / "plan.json")["working_dir"] == str(tmp_path / chdir)
            losses[chdir, seed] = summary["final"]["train_loss"]
        groups = {read(folder / "plan.json")["group"] for folder in folders}
        assert groups == {folders[0].parent.name}
    assert losses["false", 0] == losses["true", 0] != losses["false", 1] == losses["true", 1]


def test_the_second_of_three_jobs_fails(start: Start) -> None:
    """Its data raises, or its configuration is refused: the others are complete, and the exit code tells."""
    pytest.importorskip("wandb")
    raising = start("raising", "-m", *DATA, "logger=wandb", "+data.after=10", "+data.fault=null,raise,null")
    refused = start("refused", "-m", *DATA, "logger=wandb", "optimizer.lr=0.1,-1,0.2")
    for run, second in ((raising, "failed"), (refused, None)):
        assert run.wait() == 1, run.screen
        folders = jobs(run, 3)
        for folder, status in zip(folders, ("completed", second, "completed"), strict=True):
            path = folder / "summary.json"
            assert (read(path)["status"] if path.exists() else None) == status
        launched = [folder for folder in folders if (folder / "plan.json").exists()]
        assert len(launched) == (3 if second else 2)
        plans = [read(folder / "plan.json") for folder in launched]
        assert {plan["group"] for plan in plans} == {folders[0].parent.name}
        tracked = [file for folder in folders for file in folder.glob("wandb/offline-run-*/run-*.wandb")]
        ids = [file.stem.removeprefix("run-") for file in tracked]
        assert ids == [plan["run_id"] for plan in plans]
        assert len(set(ids)) == len(launched)
        assert len(list(run.run_dir.rglob("offline-run-*"))) == len(launched)
        for file, plan in zip(tracked, plans, strict=True):
            recorded = file.read_bytes()
            assert plan["group"].encode() in recorded
            assert plan["name"][-60:].encode() in recorded  # a longer one than W&B takes is cut in its middle
    assert "RuntimeError: this sample is broken" in raising.screen
    assert "`optimizer`: Invalid learning rate: -1" in refused.screen


def test_two_runs_of_one_moment_get_two_folders(start: Start) -> None:
    runs = [start("same", *DATA, "debug=fast") for _ in range(2)]
    for run in runs:
        assert run.wait() == 0, run.screen
    folders = sorted(runs[0].run_dir.glob("*/*"))
    assert len(folders) == 2
    for folder in folders:
        assert re.fullmatch(r"\d\d-\d\d-\d\d-[0-9a-f]{6}", folder.name)
        assert read(folder / "summary.json")["status"] == "completed"


def test_another_class_by_its_path_leaves_the_arguments_of_the_first(start: Start) -> None:
    """Case 92: a sweep over optimizers that no option has; a job goes on as it was."""
    optimizers = ["torch.optim.RMSprop", "torch.optim.Adagrad"]
    options = (*TINY, "launch.start_method=forkserver", "optimizer.lr=0.1")
    run = start("sweep", "-m", *options, "trainer.max_steps=2", f"optimizer._target_={','.join(optimizers)}")
    assert run.wait() == 0, run.screen
    folders = jobs(run, 2)
    for name, folder in zip(optimizers, folders, strict=True):
        config = read(folder / "plan.json")["config"]["optimizer"]
        assert config["_target_"] == name and config["lr"] == 0.1 and "betas" not in config
        assert read(folder / "summary.json")["status"] == "completed"
    more = (f"optimizer._target_={optimizers[0]}", "trainer.max_steps=4", f"resume={folders[0]}")
    rest = start("rest", *options, *more, f"hydra.run.dir={run.run_dir.parent}/rest")
    assert rest.wait() == 0, rest.screen
    assert read(run.run_dir.parent / "rest" / "summary.json")["steps"] == 4

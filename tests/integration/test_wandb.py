"""Cases 29, 31 and 32: real runs through the launcher, and what W&B's files say of them afterwards."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from launched import TINY, Launched, wait_for
from support import Train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_files import only, points, records

from hetexp.commands.sync import offline_runs
from hetexp.core.summary import modelled

Start = Callable[..., Launched]
TESTS = Path(__file__).parent.parent
COMMON = (
    *(option for option in TINY if not option.startswith(("data", "model", "logger"))),
    "model=mlp",
    "model.hidden_sizes=[8]",
    "data=custom",
    "logger=wandb",
    "launch.start_method=forkserver",
)
DOCUMENTED = TESTS.parent / "docs" / "how-to" / "tracking.md"
GIVEN_UP = "Weights & Biases is off for the rest of this run"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files; its path is short, since W&B's sockets are below it."""
    folder = Path(tempfile.mkdtemp(prefix="hx-"))
    yield folder
    left = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder)
    assert not left


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[Start]:
    started = []

    def begin(name: str, *overrides: str, **environment: str) -> Launched:
        variables = {"PYTHONPATH": python_path(TESTS), "WANDB_MODE": "offline", "TMPDIR": str(temporary)}
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # else torch makes one among temporary files
        one = Launched(
            tmp_path / name,
            *(word for word in overrides if word == "-m"),
            *COMMON,
            *(word for word in overrides if word != "-m"),
            environment=variables | environment,
            run_dir=tmp_path / name / "outputs",
        )
        started.append(one)
        return one

    yield begin
    try:
        wait_for(lambda: not any(one.processes() for one in started), "the end of all processes", 10)
    finally:
        for one in started:
            one.kill()


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH with these folders first."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def jobs(run: Launched) -> list[Path]:
    (sweep,) = run.run_dir.glob("sweeps/*/*")
    return sorted(folder for folder in sweep.iterdir() if folder.is_dir())


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def as_points(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of `metrics.jsonl` as W&B has them.

    Speeds are modelled, the step metric is its own, null is left out, NaN is a text.
    """

    def written(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value

    return [
        {
            "trainer/step" if name == "step" else name: written(value)
            for name, value in line.items()
            if value is not None
        }
        for line in map(modelled, lines)
    ]


def wandb_file(folder: Path) -> Path:
    """Return the only W&B run of a run folder."""
    (path,) = folder.glob("wandb/*run-*/run-*.wandb")
    return path


def undocumented(names: set[str]) -> set[str]:
    """Return the metrics that the guide's table does not have."""
    first = [line.split("|")[1] for line in DOCUMENTED.read_text().splitlines() if line.startswith("| `")]
    patterns = [
        re.escape(name).replace("<id>", "[^/]+").replace("<name>", r"\w+")
        for cell in first
        for name in re.findall(r"`([^`]+)`", cell)
    ]
    return {name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)}


def files_of(found: list[dict[str, Any]]) -> dict[str, str]:
    """Return the content of the only artifact, read where W&B would send it from."""
    contents = only(found, "artifact")["manifest"]["contents"]
    return {one["path"]: Path(one["local_path"]).read_text() for one in contents}


@pytest.mark.timeout(240)  # four runs; seconds on a machine that has nothing else to do
def test_a_sweep_whose_second_job_raises(start: Start, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three offline runs, none of them another's; what each holds is what `metrics.jsonl` holds.

    A fourth goes on from the first one's step 3: again a run of its own, which has the first one's points
    up to there. None of the first one's points is lost or changed.
    """
    run = start(
        "sweep",
        "-m",
        "data._target_=faulty.Data",
        "trainer.checkpoint_every=3",
        "+data.after=26",
        "+data.fault=null,raise,null",
        "trainer.max_steps=5",
        "trainer.eval_every=2",
    )
    assert run.wait() == 1, run.screen
    folders = jobs(run)
    assert len(folders) == 3
    assert len(list(run.run_dir.rglob("*.wandb"))) == 3
    seen = []
    for folder, fault in zip(folders, ("null", "raise", "null"), strict=True):
        plan = json.loads((folder / "plan.json").read_text())
        found = records(wandb_file(folder))
        told = only(found, "run")
        seen.append((told["run_id"], told["run_group"]))
        assert told["run_id"] == plan["run_id"]
        assert f"={fault},trainer.max_steps=5" in told["display_name"]  # W&B wants it cut in the middle
        assert told["job_type"] == "sweep"
        assert told["tags"] == ["hardware=auto", "ddp", "equal", "mlp", "data=custom"]
        assert only(found, "exit").get("exit_code", 0) == (1 if fault == "raise" else 0)
        steps = [line["step"] for line in metrics(folder) if "train/loss" in line]
        assert steps == ([1, 2, 3] if fault == "raise" else [1, 2, 3, 4, 5])
        assert points(found) == as_points(metrics(folder))
        assert not undocumented({name for line in metrics(folder) for name in line} - {"step"})
        line = metrics(folder)[0]
        assert [line[f"balancing/weight/cpu:{rank}"] for rank in range(2)] == [0.5, 0.5]
        assert min(line[f"device/cpu:{rank}/peak_memory_gib"] for rank in range(2)) > 0.01
        kept = files_of(found)
        assert only(found, "artifact")["name"] == f"{plan['run_id']}-run"
        assert kept["plan.json"] == (folder / "plan.json").read_text()
        assert kept["config.yaml"] == (folder / "config.yaml").read_text()
        if fault != "raise":
            assert kept["summary.json"] == (folder / "summary.json").read_text()
        axes = [record["metric"] for record in found if record["type"] == "metric"]
        assert any(axis.get("glob_name") == "*" and axis["step_metric"] == "trainer/step" for axis in axes)
    assert len({run_id for run_id, _ in seen}) == 3
    assert {group for _, group in seen} == {folders[0].parent.name}
    assert [one.file.parents[2] for one in offline_runs([run.run_dir]) if one.ended] == folders

    monkeypatch.setenv("WANDB_MODE", "offline")
    before = wandb_file(folders[0]).read_bytes()
    common = [word for word in COMMON if not word.startswith("launch")]
    data = ("data._target_=faulty.Data", "+data.after=26", "+data.fault=null")
    resume = f"resume={folders[0] / 'checkpoints' / 'step_00000003'}"
    done = train(*common, *data, resume, "trainer.max_steps=6", "trainer.eval_every=2")
    found = records(wandb_file(done.folder))
    earlier = [line for line in metrics(folders[0]) if line["step"] <= 3]
    assert points(found) == as_points([*earlier, *done.metrics])
    steps = [line["step"] for line in done.metrics if "train/loss" in line]
    assert steps == [4, 5, 6]  # 4 and 5 are in both
    assert done.losses[:2] == [
        line["train/loss"] for line in metrics(folders[0]) if "train/loss" in line and line["step"] in (4, 5)
    ]
    told = only(found, "run")
    assert told["run_id"] not in dict(seen)
    assert told["run_group"] == folders[0].parent.name
    assert "resumed" in told["tags"]
    assert told["config"]["update"]["resumed_from"] == {
        "run_id": seen[0][0],
        "group": folders[0].parent.name,
        "step": 3,
    }
    assert wandb_file(folders[0]).read_bytes() == before


@pytest.mark.timeout(240)
def test_a_killed_run_leaves_no_hole_in_the_run_that_goes_on(
    start: Start, tmp_path: Path, temporary: Path
) -> None:
    """The first is killed after its last checkpoint and before W&B's first block: its W&B file is empty."""
    slow = ("data._target_=slow_data.Slow", "trainer.checkpoint_every=3", "trainer.max_steps=8")
    killed = start("first", *slow, "trainer.eval_every=2", f"hydra.run.dir={tmp_path}/a")
    killed.run_dir = tmp_path / "a"
    wait_for(
        lambda: (
            killed.run_dir.joinpath("checkpoints/step_00000003/manifest.json").exists()
            and killed.metrics[-1]["step"] > 4
        ),
        "a checkpoint, and a step after it",
    )
    killed.kill()
    for folder in temporary.iterdir():  # a killed process removes nothing
        shutil.rmtree(folder)
    saved = max(int(path.parent.name[5:]) for path in killed.run_dir.glob("checkpoints/*/manifest.json"))
    earlier = [line for line in killed.metrics if line["step"] <= saved]
    whole = start("second", *slow, f"resume={killed.run_dir}", f"hydra.run.dir={tmp_path}/b")
    whole.run_dir = tmp_path / "b"
    assert whole.wait() == 0, whole.screen
    found = records(wandb_file(whole.run_dir))
    assert points(found) == as_points([*earlier, *whole.metrics])
    assert [point["trainer/step"] for point in points(found) if "train/loss" in point] == [*range(1, 9)]
    plan = json.loads((killed.run_dir / "plan.json").read_text())
    assert only(found, "run")["run_group"] == plan["run_id"]
    assert f"hetexp sync {whole.run_dir}" in whole.screen.replace("\n", "")
    assert [one.run_dir for one in offline_runs([whole.run_dir]) if one.ended] == [whole.run_dir]


def test_a_service_that_dies_or_stops_in_mid_training(start: Start) -> None:
    """Killed in the first job, stopped in the second: both end well, and each job has a run of its own."""
    run = start(
        "sweep",
        "-m",
        "data._target_=slow_data.Slow",
        "trainer.max_steps=9",
        "logger.finish_timeout_seconds=2",
        "trainer.seed=0,1,2",
    )

    def training(job: int) -> list[psutil.Process]:
        assert run.process.poll() is None, run.screen
        if not list(run.run_dir.glob(f"sweeps/*/*/{job}")) or len(metrics(jobs(run)[job])) < 3:
            return []
        return [process for process in run.processes() if process.name() == "wandb-core"]

    for job, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        (core,) = wait_for(lambda: training(job), f"three steps of job {job}")
        core.send_signal(number)
    assert run.wait() == 0, run.screen
    *hurt, whole = jobs(run)
    for folder in (*hurt, whole):
        assert [line["step"] for line in metrics(folder) if "train/loss" in line] == list(range(1, 10))
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    for folder in hurt:
        log = (folder / "logs" / "rank_0.log").read_text()
        assert log.count(GIVEN_UP) == 1, log
        assert str(folder / "wandb") in log
    assert GIVEN_UP not in (whole / "logs" / "rank_0.log").read_text()
    found = records(wandb_file(whole))
    assert points(found) == as_points(metrics(whole))
    assert len({wandb_file(folder).name for folder in (*hurt, whole)}) == 3


OWN_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, limit: float, sizes: list[list[int]], scale: float | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)
"""


def test_nan_is_seen_and_the_configuration_comes_back(
    train: Train, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_model_of_this_test.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = train(
        "logger=multi",
        "hardware.devices=[cpu,'emulated:rtx_3090']",
        "data=synthetic",
        "optimizer=sgd",
        "optimizer.lr=1e38",
        "model=custom",
        "model._target_=own_model_of_this_test.Net",
        "+model.limit=inf",
        "+model.sizes=[[1,2],[3]]",
        "+model.scale=null",
        "name='seed ${trainer.seed}'",
        "trainer.max_epochs=null",
        "trainer.max_steps=4",
        "trainer.log_every=1",
        "trainer.non_finite=continue",
        "trainer.seed=7",
    )
    found = records(wandb_file(done.folder))
    assert math.isfinite(done.losses[0])
    assert math.isnan(done.losses[3])
    assert '"train/loss": NaN' in (done.folder / "metrics.jsonl").read_text()
    logged = points(found)
    assert logged == as_points(done.metrics)
    assert [point["train/loss"] for point in logged if "train/loss" in point][-1] == "NaN"

    # The other trackers were told the same.
    with (done.folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{name: cell for name, cell in row.items() if cell} for row in rows] == [
        {name: str(value) for name, value in modelled(line).items() if value is not None}
        for line in done.metrics
    ]
    events = EventAccumulator(str(done.folder / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in losses] == [1, 2, 3, 4] and math.isnan(losses[-1][1])
    assert [event.value for event in events.Scalars("balancing/weight/emulated_0")] == [0.5] * 4

    # Where this machine was too slow for the emulated card, the tags were written once more in the end.
    told, *ended = [record["run"] for record in found if record["type"] == "run"]
    assert [one["tags"] for one in ended] == ([] if done.summary["valid"] else [[*told["tags"], "invalid"]])
    assert told["tags"] == ["emulated", "ddp"]  # a run that Hydra starts has its groups' options, too
    assert told["display_name"] == "seed 7"
    assert told["job_type"] == "train"
    config = {
        name: value for name, value in told["config"]["update"].items() if name not in ("_wandb", "plan")
    }
    saved = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert saved["model"]["limit"] == math.inf
    saved["model"]["limit"] = "inf"  # W&B's own form
    assert config == saved
    assert config["model"]["sizes"] == [[1, 2], [3]]
    assert config["model"]["scale"] is None
    assert config["name"] == "seed 7"


def test_without_wandb_or_without_a_network(start: Start, tmp_path: Path) -> None:
    """The training goes on, with one warning that tells what to do, within the time that was set."""
    (tmp_path / "none").mkdir()
    fake = "raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')\n"
    (tmp_path / "none" / "wandb.py").write_text(fake)
    (tmp_path / "home").mkdir()
    options = ("data._target_=faulty.Data", "trainer.max_steps=2", "hydra.run.dir=run")
    runs = {
        "it is not installed (pip install wandb, or logger=none)": start(
            "absent", *options, PYTHONPATH=python_path(tmp_path / "none", TESTS)
        ),
        "it did not start within 1 s": start(
            "online",
            *options,
            "logger.init_timeout_seconds=1",
            "logger.finish_timeout_seconds=1",
            WANDB_MODE="online",
            WANDB_API_KEY="0" * 40,
            WANDB_BASE_URL="http://127.0.0.1:9",
            HOME=str(tmp_path / "home"),
        ),
    }
    for told, run in runs.items():
        assert run.wait() == 0, run.screen
        folder = run.run_dir.parent / "run"
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
        log = (folder / "logs" / "rank_0.log").read_text()
        assert log.count(GIVEN_UP) == 1, log
        assert told in log
        assert len(metrics(folder)) >= 2


def test_tracking_moves_to_another_process_when_its_own_dies(start: Start) -> None:
    """Rank 0, which talks to the trackers, is killed; each tracker has all of the run all the same."""
    run = start(
        "moves",
        "data._target_=faulty.Data",
        "strategy=ddp",
        "hardware.devices=[cpu,cpu]",
        "fault.survive=true",
        "fault.respawn=0",
        "fault.events=[{kind: death, device: 'cpu:0', at_step: 4}]",
        "trainer.max_steps=9",
        "trainer.eval_every=3",
        "logger=multi",
        "logger.loggers.csv={_target_:hetexp.logger.csv.CsvLogger}",
    )
    assert run.wait() == 0, run.screen
    (folder,) = {path.parent for path in run.run_dir.rglob("metrics.jsonl")}
    lines = metrics(folder)
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 10))

    found = records(wandb_file(folder))
    assert only(found, "run")["run_id"] == json.loads((folder / "plan.json").read_text())["run_id"]
    assert points(found) == as_points(lines)
    assert only(found, "exit").get("exit_code", 0) == 0
    assert json.loads(files_of(found)["summary.json"])["steps"] == 9
    assert len(list(folder.glob("wandb/replaced/*run-*/run-*.wandb"))) == 1

    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [line["step"] for line in lines]
    told = [row["train/loss"] for row in rows if row["train/loss"]]
    assert list(map(float, told)) == [line["train/loss"] for line in lines if "train/loss" in line]

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 10))
    assert len(list(folder.glob("tensorboard/*"))) == 1

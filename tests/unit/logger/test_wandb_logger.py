"""Real offline W&B runs: what they hold, what they survive, and that they leave no process behind.

Every run is made in a process of its own, as in a worker; `PRELUDE` gives its script the helpers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from wandb_files import only, points, records, without_wandb_variables
from wandb_server import Server

from hetexp.core.files import remove_temporary_folders

PRELUDE = """
import json, logging, math, os, shutil, signal, sys, threading
from pathlib import Path
import psutil
from hetexp.logger.base import RunInfo
from hetexp.logger.wandb import WandbLogger

warnings = []
class Collect(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())
logging.getLogger("hetexp").addHandler(Collect())
logging.getLogger("hetexp").propagate = False
environment = dict(os.environ)
root = Path(sys.argv[1])

def info(run_id, **values):
    run_dir = root / run_id
    run_dir.mkdir()
    fields = dict(run_id=run_id, run_dir=run_dir, name=f"name of {run_id}", group=None, job_type="train")
    return RunInfo(**(fields | dict(tags=(), config={}) | values))

def helpers():
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]

def report(**values):
    same = dict(os.environ) == environment
    print(json.dumps({"warnings": warnings, "left": len(helpers()), "environment": same, "pid": os.getpid()}
                     | values))
"""


def clean_environment(**extra: str) -> dict[str, str]:
    return without_wandb_variables() | {"PYTHONPATH": str(Path(__file__).parents[3])} | extra


def run_script(script: str, root: Path, **environment: str) -> dict[str, Any]:
    """Run `PRELUDE` and `script`; it must end well, print its report only, and leave no process behind."""
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(root)],
        env=clean_environment(HETEXP_TEST_ROOT=str(root), **environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report: dict[str, Any] = json.loads(result.stdout)
    assert not wandb_processes(root)
    assert not list(Path(tempfile.gettempdir()).glob(f"hetexp-{report['pid']}-*"))
    return report


def wandb_processes(root: Path) -> list[psutil.Process]:
    """Processes of wandb whose command or inherited environment names `root`."""
    found = []
    for process in psutil.process_iter():
        try:
            if "wandb-" in process.name() and process.environ().get("HETEXP_TEST_ROOT") == str(root):
                found.append(process)
        except psutil.Error:
            continue
    return found


def files(root: Path, run_id: str) -> list[Path]:
    return sorted((root / run_id / "wandb").glob(f"*run-*/run-{run_id}.wandb"))


WHOLE_RUN = """
from enum import Enum
import numpy as np
class Kind(Enum):
    FAST = "fast"
config = {"lr": 0.1, "none": None, "inf": math.inf, "nan": math.nan, "path": Path("/a"), "kind": Kind.FAST,
          "layers": {1, }, "deep": {"targets": ["q", "v"], "low": [-math.inf]}}
logger = WandbLogger(project="proj", entity="team")
logger.start(info("chosen", group="sweep-1", tags=("a", "long" * 20), config=config))
for name in ("plan.json", "plan.svg", "metrics.jsonl", ".plan.json.1.tmp"):
    (root / "chosen" / name).write_text(name)
with (root / "chosen" / "plan.png").open("wb") as large:
    large.truncate(2**30)
started = [p.name() for p in helpers()]
taken, send = threading.Event(), logger._run.log
logger._run.log = lambda values: (taken.wait(), send(values))
for step in range(1, 6):  # W&B takes none of them before the last one has returned
    loss = math.nan if step == 4 else np.float32(step)
    logger.log({"loss": loss, "text": "x", "gone": None, "count": step}, step * 10)
taken.set()
logger.finish({"final": {"loss": 5.0}, "best": math.nan, "valid": False}, 3)
logger.log({"loss": 1.0}, 99)
logger.finish({}, 0)
report(started=started)
"""


AGENTS_RUN = """
os.chdir(root)
logger = WandbLogger(mode="offline")
logger.start(info("ours", job_type=os.environ["JOB_TYPE"]))
logger.log({"loss": 1.0}, 1)
logger.finish({}, 0)
report()
"""


@pytest.mark.parametrize(("job_type", "run_id"), [("train", "theirs"), ("sweep", "ours")])
def test_a_wandb_sweep_gets_the_run_that_its_agent_started(
    tmp_path: Path, job_type: str, run_id: str
) -> None:
    """Jobs of a Hydra sweep are several runs, which cannot all be the agent's one."""
    parameters = tmp_path / "wandb" / "sweep-s1" / "config-theirs.yaml"
    parameters.parent.mkdir(parents=True)
    parameters.write_text("wandb_version: 1\ntrainer.seed:\n  value: 4\n")
    agents = {
        "WANDB_RUN_ID": "theirs",
        "WANDB_SWEEP_ID": "s1",
        "WANDB_SWEEP_PARAM_PATH": str(parameters.relative_to(tmp_path)),
    }
    report = run_script(AGENTS_RUN, tmp_path, JOB_TYPE=job_type, **agents)
    assert report["warnings"] == [] and report["environment"]
    (path,) = (tmp_path / "ours" / "wandb").glob("*run-*/run-*.wandb")
    found = records(path)
    run = next(record["run"] for record in found if record["type"] == "run")
    assert run["run_id"] == run_id
    assert run.get("sweep_id", "") == ("s1" if job_type == "train" else "")
    assert points(found) == [{"loss": 1, "trainer/step": 1}]


def test_a_run_holds_each_point_once_and_readable_values(tmp_path: Path) -> None:
    leftovers = {
        "WANDB_RUN_ID": "another",
        "WANDB_SWEEP_ID": "s",
        "WANDB_SWEEP_PARAM_PATH": "/nowhere",
        "WANDB_SERVICE": "3-1-unix-/nowhere",
        "WANDB_RESUME": "must",
    }
    report = run_script(WHOLE_RUN, tmp_path, **leftovers)
    assert report["warnings"] == [] and report["left"] == 0 and report["environment"]
    assert "wandb-core" in report["started"]

    (path,) = files(tmp_path, "chosen")
    assert path.parent.name.startswith("offline-run-")
    found = records(path)
    assert points(found) == [
        {"loss": "NaN" if step == 4 else step, "text": "x", "count": step, "trainer/step": step * 10}
        for step in range(1, 6)
    ]
    run, ended = [record["run"] for record in found if record["type"] == "run"]
    assert ended["tags"] == [*run["tags"], "invalid"]
    assert all(ended[key] == run[key] for key in ("run_id", "display_name", "run_group", "job_type"))
    assert (run["run_id"], run["project"], run["entity"]) == ("chosen", "proj", "team")
    assert (run["display_name"], run["run_group"], run["job_type"]) == ("name of chosen", "sweep-1", "train")
    assert run["tags"] == ["a", ("long" * 20)[:64]]
    config = {name: value for name, value in run["config"]["update"].items() if name != "_wandb"}
    assert config == {
        "lr": 0.1,
        "none": None,
        "inf": "inf",
        "nan": "nan",
        "path": "/a",
        "kind": "fast",
        "layers": [1],
        "deep": {"targets": ["q", "v"], "low": ["-inf"]},
    }
    metrics = [
        record["metric"] | {"in": record["metric"].get("step_metric")}
        for record in found
        if record["type"] == "metric"
    ]
    assert any(m.get("glob_name") == "*" and m["in"] == "trainer/step" for m in metrics)
    assert [record["exit"]["exit_code"] for record in found if record["type"] == "exit"] == [3]
    artifact = only(found, "artifact")
    assert (artifact["name"], artifact["type"]) == ("chosen-run", "run-files")
    contents = {one["path"]: one for one in artifact["manifest"]["contents"]}
    assert list(contents) == ["plan.json", "plan.svg", "summary.json"]
    for name, one in contents.items():
        kept = Path(one["local_path"])
        assert kept == (path.parent if name == "summary.json" else tmp_path / "chosen") / name
        assert base64.b64encode(hashlib.md5(kept.read_bytes()).digest()).decode() == one["digest"]
    assert json.loads((path.parent / "summary.json").read_text())["final"] == {"loss": 5.0}
    assert not [record for record in found if record["type"] in ("output", "output_raw")]
    assert not list(path.parent.glob("files/**/*.py")) and not list(path.parent.glob("files/*.patch"))


TWO_RUNS = """
first = WandbLogger()
first.start(info("one"))
first.log({"loss": 1.0}, 1)
second = WandbLogger()
second.start(info("two"))
second.log({"loss": 2.0}, 1)
second.finish({}, 0)
third = WandbLogger()
third.start(info("three"))
third.log({"loss": 3.0}, 1)
third.finish({}, 0)
shutil.rmtree(first._temporary)  # in a real run the launcher does it once the process has ended
report()
"""


def test_a_run_that_was_never_finished_leaves_the_next_one_alone(tmp_path: Path) -> None:
    report = run_script(TWO_RUNS, tmp_path)
    assert report["warnings"] == [] and report["left"] == 0 and report["environment"]
    for number, run_id in enumerate(("one", "two", "three"), start=1):
        (path,) = files(tmp_path, run_id)
        assert points(records(path)) == [{"loss": number, "trainer/step": 1}]


MODES = """
logger = WandbLogger(**json.loads(os.environ["ARGUMENTS"]))
logger.start(info("run"))
used = [p.name() for p in helpers()]
mode = getattr(getattr(logger._run, "settings", None), "mode", None)
logger.log({"loss": 1.0}, 1)
logger.finish({}, 0)
report(used=used, mode=mode, imported="wandb" in sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "variable", "mode"),
    [
        ({}, "disabled", None),
        ({"mode": "disabled"}, "offline", None),
        ({"mode": "offline"}, "disabled", "offline"),
    ],
)
def test_the_mode_is_the_argument_then_the_variable(
    arguments: dict[str, str], variable: str, mode: str | None, tmp_path: Path
) -> None:
    report = run_script(MODES, tmp_path, ARGUMENTS=json.dumps(arguments), WANDB_MODE=variable)
    assert report["warnings"] == [] and report["left"] == 0
    assert report["mode"] == mode
    assert len(files(tmp_path, "run")) == (1 if mode else 0)
    assert report["imported"] == (mode is not None)


@pytest.mark.parametrize("variable", ["online", "nonsense"])
def test_an_unusable_mode_is_one_warning(variable: str, tmp_path: Path) -> None:
    """Online without a key and a network: asks for nothing, waits no longer than it may."""
    (tmp_path / "home").mkdir()
    report = run_script(
        MODES,
        tmp_path,
        ARGUMENTS='{"init_timeout_seconds": 3, "finish_timeout_seconds": 2}',
        WANDB_MODE=variable,
        HOME=str(tmp_path / "home"),
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    (warning,) = report["warnings"]
    assert warning.startswith("Weights & Biases is off for the rest of this run: it ")
    assert report["left"] == 0


KILLED_SERVICE = """
logger = WandbLogger()
logger.start(info("run"))
for step in range(5):
    logger.log({"loss": step}, step)
(core,) = [p for p in helpers() if p.name() == "wandb-core"]
family = [core, *core.children(recursive=True)]
core.send_signal(signal.SIGKILL)
psutil.wait_procs([core], timeout=10) if core.status() != psutil.STATUS_ZOMBIE else None
for step in range(5, 200):
    logger.log({"loss": step}, step)
logger.finish({"loss": 1.0}, 0)
gone, alive = psutil.wait_procs(family, timeout=2)
second = WandbLogger()
second.start(info("next"))
second.log({"loss": 7.0}, 1)
second.finish({}, 0)
report(family=len(family), alive=[p.name() for p in alive],
       threads=[t.name for t in threading.enumerate() if t.name.startswith("hetexp")])
"""


def test_a_killed_service_is_one_warning_and_the_next_run_works(tmp_path: Path) -> None:
    report = run_script(KILLED_SERVICE, tmp_path)
    (warning,) = report["warnings"]
    assert "Connection" in warning and str(tmp_path / "run" / "wandb") in warning
    assert report["family"] == 2 and report["alive"] == [] and report["left"] == 0
    assert report["threads"] == [] and report["environment"]
    assert points(records(files(tmp_path, "next")[0])) == [{"loss": 7, "trainer/step": 1}]


RESUMED = """
from dataclasses import replace
steps, known = json.loads(os.environ["STEPS"])
run = info("made") if not (root / "made").exists() else replace(info(f"part-{steps[0]}"), run_id="made")
logger = WandbLogger(project="proj")
logger.start(run)
logger.retell({"step": step, "loss": 1.0 / step, "none": None} for step in known)
for step in steps:
    logger.log({"loss": 1.0 / step}, step)
logger.finish({}, 0)
report()
"""


def test_a_run_that_goes_on_online_sends_each_line_once(tmp_path: Path) -> None:
    """W&B has the first three lines; a process that was killed had logged two more."""
    (tmp_path / "home").mkdir()
    online = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "HOME": str(tmp_path / "home")}
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for steps, known in (([1, 2, 3], []), ([6, 7], [1, 2, 3, 4, 5])):
            part = json.dumps([steps, known])
            report = run_script(RESUMED, tmp_path, STEPS=part, WANDB_BASE_URL=server.address, **online)
            # This server takes no artifacts.
            assert all("did not take the files" in warning for warning in report["warnings"])
            assert report["left"] == 0
        server.shutdown()
    sent = [(line["trainer/step"], line["loss"]) for line in server.history["made"]]
    assert sent == [(step, 1.0 / step) for step in range(1, 8)]


STUCK = """
import hetexp.logger.wandb
logger = WandbLogger(finish_timeout_seconds=1.0)
logger.start(info("run"))
family = helpers()
(core,) = [p for p in family if p.name() == "wandb-core"]
if os.environ["STUCK"] == "finish":
    logger._run.finish = lambda exit_code: threading.Event().wait()
    num_steps = 1_500  # more than may wait: the service catches up
else:
    core.send_signal(signal.SIGSTOP)
    hetexp.logger.wandb._STALL_SECONDS = 0.5
    num_steps = 12_000
for step in range(num_steps):
    logger.log({f"metric{i}": step for i in range(20)}, step)
logger.finish({}, 0)
gone, alive = psutil.wait_procs(family, timeout=2)
second = WandbLogger()
second.start(info("next"))
second.log({"loss": 7.0}, 1)
second.finish({}, 0)
report(alive=[p.name() for p in alive])
"""


@pytest.mark.parametrize("what", ["finish", "service"])
def test_a_hanging_finish_or_service_is_bounded(what: str, tmp_path: Path) -> None:
    report = run_script(STUCK, tmp_path, STUCK=what)
    (warning,) = report["warnings"]
    assert ("did not finish within 1 s" if what == "finish" else "log calls waiting") in warning
    assert report["alive"] == [] and report["left"] == 0 and report["environment"]
    assert points(records(files(tmp_path, "next")[0])) == [{"loss": 7, "trainer/step": 1}]


NO_FILES = """
import wandb
def refuse(self, *args, **options):
    raise ValueError("no such policy")
wandb.Artifact.add_file = refuse
logger = WandbLogger()
logger.start(info("run"))
(root / "run" / "plan.json").write_text("{}")
logger.log({"loss": 1.0}, 1)
logger.finish({"steps": 1}, 0)
report()
"""


def test_files_that_are_not_taken_cost_no_point(tmp_path: Path) -> None:
    report = run_script(NO_FILES, tmp_path)
    (warning,) = report["warnings"]
    assert warning.endswith(f"did not take the files of {tmp_path / 'run'}: no such policy")
    found = records(files(tmp_path, "run")[0])
    assert points(found) == [{"loss": 1, "trainer/step": 1}]
    assert only(found, "exit").get("exit_code", 0) == 0
    assert not [record for record in found if record["type"] == "artifact"]


FOREIGN = """
import wandb
theirs = wandb.init(mode="offline", dir=str(root), settings=wandb.Settings(silent=True, console="off"))
logger = WandbLogger()
logger.start(info("run"))
logger.log({"loss": 1.0}, 1)
logger.finish({}, 0)
theirs.log({"theirs": 1})
alive = wandb.run is theirs
theirs.finish()
wandb.teardown()
report(alive=alive)
"""


def test_a_run_that_somebody_else_opened_goes_on(tmp_path: Path) -> None:
    report = run_script(FOREIGN, tmp_path)
    assert report["alive"] and report["warnings"] == [] and report["left"] == 0
    (theirs,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert points(records(theirs)) == [{"theirs": 1}]
    assert points(records(files(tmp_path, "run")[0])) == [{"loss": 1, "trainer/step": 1}]


WAITING = """
logger = WandbLogger()
logger.start(info("run"))
print(json.dumps([p.pid for p in helpers()]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def orphans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[psutil.Process]]:
    """Processes of wandb whose trainer was killed before the first test: the last need hardly wait."""
    root = tmp_path_factory.mktemp("killed")
    trainer = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + WAITING, str(root)],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
        assert trainer.stdout is not None
        family = [psutil.Process(pid) for pid in json.loads(trainer.stdout.readline())]
        trainer.send_signal(signal.SIGKILL)
    mine = f"hetexp-{trainer.pid}-*"
    assert list(Path(tempfile.gettempdir()).glob(mine))  # as the launcher finds them
    remove_temporary_folders(trainer.pid)
    assert not list(Path(tempfile.gettempdir()).glob(mine))
    yield family
    for process in psutil.wait_procs(family, timeout=0)[1]:
        process.kill()


def test_the_service_of_a_killed_process_ends_by_itself(orphans: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(orphans, timeout=20)
    assert orphans and not alive

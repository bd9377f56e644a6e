"""A rank that fails: who, where and why is told at once, and every process ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import Train

from hetexp.core.errors import RunFailedError

SAMPLES_BEFORE = 2 + 3 * 8
"""Read before step 3 is done: two while the objects are built, then 8 a step."""
COMMON = (
    "hardware.devices=[cpu,cpu]",
    "trainer.global_batch_size=16",
    "trainer.max_epochs=null",
    "trainer.max_steps=50",
    "trainer.log_every=1",
    "launch.grace_seconds=2",
)
DATA = ("data=custom", "data._target_=faulty.Data", "model=mlp", "model.hidden_sizes=[8]")
MODEL = (*DATA[:2], "model=custom", "model._target_=faulty.Net")


class Failed:
    """What a failed run left behind."""

    def __init__(self, train: Train, folder: Path, *overrides: str) -> None:
        with pytest.raises(RunFailedError) as caught:
            train(*COMMON, *overrides, folder=folder)
        self.error = caught.value
        self.screen: str = self.error.screen  # type: ignore[attr-defined]
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        self.by_device = {failure["device"]: failure for failure in self.summary["failures"]}
        self.trained = (folder / "metrics.jsonl").exists()
        assert self.error.exit_code == 1
        assert self.summary["status"] == "failed"
        assert self.summary["error"] == str(self.error)


def test_an_exception_in_the_data(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A person's own module beside the run, and ranks that are processes of their own: found by import_paths.
    text = Path(__file__).parent.parent.joinpath("faulty.py").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_data_of_this_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    failed = Failed(
        train,
        tmp_path / "run",
        *DATA,
        "data._target_=own_data_of_this_test.Data",
        "+data.fault=raise",
        f"+data.after={SAMPLES_BEFORE}",
        "launch.start_method=subprocess",
    )
    assert "rank 1, cpu:1 (" in str(failed.error)
    assert "failed at step 3: RuntimeError: this sample is broken" in str(failed.error)
    assert "Traceback (most recent call last)" in failed.screen
    assert "own_data_of_this_test.py" in failed.screen
    assert "Followed by: rank 0 (lost a peer)." in failed.screen
    assert failed.by_device["cpu:1"] == {
        "step": 3,
        "device": "cpu:1",
        "kind": "RuntimeError",
        "recovered_s": None,
        "steps_lost": None,
    }
    assert failed.by_device.keys() == {"cpu:0", "cpu:1"}


def test_an_exception_in_the_model(train: Train, tmp_path: Path) -> None:
    failed = Failed(train, tmp_path / "run", *MODEL, "+model.fail_at=4")
    assert "ArithmeticError: this layer does not like its input" in str(failed.error)
    assert "Followed by: rank 0 (lost a peer)." in failed.screen
    assert failed.by_device["cpu:1"]["kind"] == "ArithmeticError"
    assert failed.by_device["cpu:1"]["step"] == 3


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("SIGKILL", "SIGKILL", "killed by SIGKILL"),
        ("SIGSEGV", "SIGSEGV", "killed by SIGSEGV"),
        ("_exit 3", "exit code 3", "ended with exit code 3"),
        ("_exit 0", "EndedEarly", "ended as if it had finished"),
        ("sys.exit", "SystemExit", "SystemExit: enough of this"),
        ("say gloo", "RuntimeError", "RuntimeError: Connection reset by peer while reading this sample"),
    ],
)
def test_a_rank_that_ends(train: Train, tmp_path: Path, fault: str, kind: str, reason: str) -> None:
    failed = Failed(train, tmp_path / "run", *DATA, f"+data.fault='{fault}'", f"+data.after={SAMPLES_BEFORE}")
    assert "rank 1, cpu:1 (" in str(failed.error)
    assert reason in str(failed.error)
    if not kind.endswith(("Exit", "Error")):  # these tell by themselves; of the others the log is shown
        assert f"rank 1 was here, at its sample {SAMPLES_BEFORE + 1}" in failed.screen
    assert "Followed by: rank 0 (lost a peer)." in failed.screen
    assert failed.by_device["cpu:1"]["kind"] == kind


def test_an_exception_in_a_data_loader_process(train: Train, tmp_path: Path) -> None:
    options = ("+data.fault=raise", "+data.after=10", "trainer.num_workers=1")
    failed = Failed(train, tmp_path / "run", *DATA, *options)
    assert "RuntimeError: this sample is broken" in str(failed.error)
    assert "rank 0 (lost a peer)" in failed.screen


@pytest.mark.parametrize("fault", ["raise", "_exit 0"])
def test_a_rank_that_ends_before_training(train: Train, tmp_path: Path, fault: str) -> None:
    failed = Failed(train, tmp_path / "run", *DATA, f"+data.fault='{fault}'", "+data.after=-1")
    assert "rank 1, cpu:1 (" in str(failed.error)
    assert not failed.trained


def test_a_rank_that_hangs_before_training(train: Train, tmp_path: Path) -> None:
    limit = 6
    options = ("+data.fault=hang", "+data.after=-1", f"launch.timeout_seconds={limit}")
    failed = Failed(train, tmp_path / "run", *DATA, *options)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    address = f"{plan['store_host']}:{plan['store_port']}"
    assert f"connected to {address} but did not build its data and model within {limit} s" in str(
        failed.error
    )
    assert "rank 1, cpu:1 (" in str(failed.error)
    assert "rank 1 was here" in failed.screen
    assert failed.by_device.keys() == {"cpu:1"}
    assert failed.by_device["cpu:1"]["kind"] == "StartTimeout"
    assert not failed.trained


def test_a_rank_that_stands_still_before_training(train: Train, tmp_path: Path) -> None:
    """Nobody waits for `launch.timeout_seconds`: no sign of life is due, but the kernel tells of it."""
    failed = Failed(train, tmp_path / "run", *DATA, "+data.fault=SIGSTOP", "+data.after=-1")
    assert "rank 1, cpu:1 (" in str(failed.error)
    assert "was stopped before training, for 1 s (fault.heartbeat_seconds)." in str(failed.error)
    assert failed.by_device["cpu:1"]["kind"] == "Frozen"
    assert not failed.trained


def test_a_rank_that_stands_still_when_all_is_done(train: Train) -> None:
    model = ("model=custom", "model._target_=faulty.StopsAtTheEnd")
    run = train(*COMMON, *DATA[:2], *model)
    assert run.summary["status"] == "completed"
    assert run.summary["failures"] == []


def test_a_rank_that_never_connects(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An interpreter that has all packages and starts, but is caught in its own start-up file.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "if '--rank' in sys.argv and sys.argv[-1] == '1':\n"
        "    threading.Event().wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limit = 10
    options = ("launch.start_method=subprocess", f"launch.timeout_seconds={limit}")
    failed = Failed(train, tmp_path / "run", *DATA, *options)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert f"did not connect to {plan['store_host']}:{plan['store_port']} within {limit} s" in str(
        failed.error
    )
    assert "rank 1, cpu:1 (" in str(failed.error)
    assert failed.by_device.keys() == {"cpu:1"}


def test_models_of_different_size(train: Train, tmp_path: Path) -> None:
    failed = Failed(train, tmp_path / "run", *MODEL, "+model.wider=true")
    assert failed.by_device["cpu:0"]["kind"] == failed.by_device["cpu:1"]["kind"] == "HandshakeError"
    assert "model.parameters is 23 on rank 0 (cpu:0), 30 on rank 1 (cpu:1)" in str(failed.error)
    assert "model.shape.layers.0.weight is [3, 4] torch.float32 on rank 0" in str(failed.error)
    assert "data." not in str(failed.error)
    assert not failed.trained


def test_data_of_different_length(train: Train, tmp_path: Path) -> None:
    failed = Failed(train, tmp_path / "run", *DATA, "+data.longer=6")
    assert failed.by_device["cpu:0"]["kind"] == "HandshakeError"
    assert "data.training_samples is 64 on rank 0 (cpu:0), 70 on rank 1 (cpu:1)" in str(failed.error)
    assert "model." not in str(failed.error)
    assert not failed.trained


def test_a_rank_that_stands_still(train: Train, tmp_path: Path) -> None:
    """Case 50: a stopped process is what a frozen driver looks like to the others."""
    limit = 3
    options = ("+data.fault=SIGSTOP", f"+data.after={SAMPLES_BEFORE}", f"comm.timeout_seconds={limit}")
    failed = Failed(train, tmp_path / "run", *DATA, *options)
    assert f"did not answer the others within {limit} s (comm.timeout_seconds)" in str(failed.error)
    assert "rank 1, cpu:1 (" in str(failed.error)
    assert "Followed by: rank 0 (lost a peer)." in failed.screen
    assert failed.by_device["cpu:1"]["kind"] == "NotResponding"


SLOW = (
    "data=custom",
    "data._target_=faulty.SlowToEvaluate",
    "model=mlp",
    "model.hidden_sizes=[8]",
    "trainer.max_steps=2",
    "trainer.eval_every=1",
    "comm.timeout_seconds=2",
)


def test_an_evaluation_that_takes_longer_than_a_collective_waits(train: Train) -> None:
    """Case 50: work that takes its time is no lost rank."""
    run = train(*COMMON, *SLOW, "+data.seconds=0.1")
    assert run.summary["status"] == "completed"
    assert len([row for row in run.metrics if "eval/loss" in row]) == 2


def test_a_rank_that_stands_still_in_an_evaluation(train: Train, tmp_path: Path) -> None:
    failed = Failed(train, tmp_path / "run", *SLOW, "+data.seconds=0.01", "+data.stop_at=40")
    assert "rank 1, cpu:1 (" in str(failed.error)
    assert failed.by_device["cpu:1"]["kind"] == "NotResponding"


@pytest.mark.parametrize(
    "options",
    [
        ("strategy=ddp",),
        ("strategy=ddp", "trainer.eval_every=2", "trainer.checkpoint_every=2", "trainer.keep_last=1"),
        ("strategy=local_sgd", "strategy.sync_every=2"),
        ("strategy=independent", "strategy.merge=false"),
        ("strategy=pipeline",),
    ],
    ids=lambda options: options[0].partition("=")[2] + ", asked for" * (len(options) > 2),
)
def test_an_error_in_the_last_evaluation_loses_no_training(
    train: Train, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Case 62: all steps are saved, and a run that goes on from them does nothing but evaluate."""
    data = ("data=custom", "data._target_=faulty.BadToEvaluate", "model=mlp", "model.hidden_sizes=[8,8]")
    common = (*data, *options, "trainer.max_steps=2")
    failed = Failed(train, tmp_path / "run", *common, "+data.fault=raise")
    assert "this sample is broken" in str(failed.error)
    run = train(*COMMON, *common, f"resume={tmp_path / 'run'}")
    assert run.summary["status"] == "completed" and run.summary["steps"] == 2
    assert [sorted(row) for row in run.metrics if "train/loss" in row] == []
    assert run.summary["final"]["eval"]["loss"] > 0
    if options[0] != "strategy=independent":
        (folder,) = (run.folder / "checkpoints").glob("step_*")
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["evaluation"] == run.summary["final"]["eval"] | {"samples": 64.0}


def test_fewer_devices_than_the_user_wants_end_the_run(train: Train, tmp_path: Path) -> None:
    survives = ("fault.survive=true", "fault.respawn=0", "fault.min_devices=2")
    death = "fault.events=[{kind: death, device: 'cpu:1', at_step: 3}]"
    failed = Failed(train, tmp_path / "run", *DATA, *survives, death)
    assert "1 of its devices are left, and `fault.min_devices` is 2." in " ".join(failed.screen.split())
    assert failed.by_device["cpu:1"]["kind"] == "SIGKILL"
    assert failed.by_device["cpu:1"]["recovered_s"] is None

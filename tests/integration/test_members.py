"""Devices go and come while a run trains, and it computes what one device alone computes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import slow_data
import torch.distributed as dist
from launched import TINY, TRAIN, Launched, wait_for
from stranger import stranger
from support import Train

from hetexp.checkpoint.manifest import search_checkpoint, step_of
from hetexp.commands.control import main_add, main_control, main_drop
from hetexp.core.epoch import LATEST, LATEST_REQUEST, Epoch, Request, answer_key, beat_key
from hetexp.launch import launcher
from hetexp.launch.processes.members import Member, pause_for
from hetexp.launch.processes.process import RUN_SECRET

THREE = "hardware.devices=[cpu,cpu,cpu]"
SLOW = ("data=custom", "data._target_=slow_data.Slow", "trainer.precision=float64")
HANG = "{kind: hang, device: 'cpu:2', at_step: 4}"
ERROR = "{kind: device_error, device: 'cpu:0', at_step: 8}"
EXACT = 1e-12


def test_a_run_outlives_its_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = [option for option in TINY if not option.startswith(("data", "hardware.devices"))]
    path = os.pathsep.join([str(Path(slow_data.__file__).parent), str(TRAIN.parent)])
    run = Launched(
        tmp_path,
        *kept,
        *SLOW,
        THREE,
        "trainer.max_steps=1000000",
        "launch.start_method=forkserver",
        "fault.respawn_seconds=0.1",
        environment={"PYTHONPATH": path},
    )
    try:
        run.wait_until_training()
        run.ranks()[1].kill()
        wait_for(lambda: "cpu:1 was lost at step" in run.screen, "word of cpu:1's death")
        wait_for(lambda: "takes part from step" in run.screen, "cpu:1's return")
        run.ranks()[0].send_signal(signal.SIGSTOP)  # the first rank, which writes the metrics
        wait_for(lambda: "(Frozen); 2 devices go on" in run.screen, "word of cpu:0's freezing")
        wait_for(lambda: run.screen.count("takes part from step") == 2, "cpu:0's return")
        folder = str(run.run_dir)
        assert main_drop([folder, "cpu:2"]) == 0
        assert main_add([folder, "cpu"]) == 0  # a fourth one
        assert main_control([folder, "checkpoint"]) == 0
        assert main_control([folder, "nonsense"]) == 1
        assert main_drop([folder, "cpu:7"]) == 1
        told = capsys.readouterr()
        run.process.terminate()
        assert run.wait() == 143, run.screen
    finally:
        run.kill()
    assert "cpu:3" in told.out
    assert "`nonsense` is no request that this run knows" in told.err
    assert "`DEVICE` must be one of cpu:0, cpu:1, cpu:2, cpu:3, but is 'cpu:7' instead." in told.err
    summary = run.summary
    assert [(one["device"], one["kind"], one["steps_lost"]) for one in summary["failures"]] == [
        ("cpu:1", "SIGKILL", 0),
        ("cpu:0", "Frozen", 0),
    ]
    assert all(one["recovered_s"] > 0 for one in summary["failures"])
    assert summary["status"] == "interrupted"
    assert summary["steps"] == step_of(search_checkpoint(run.run_dir)[0])
    steps = [row["step"] for row in run.metrics if "train/loss" in row]
    assert steps == list(range(1, summary["steps"] + 1))


def test_a_rank_that_hangs_is_named(train: Train) -> None:
    common = [option for option in TINY if not option.startswith("hardware.devices")]
    common += ["trainer.precision=float64", "trainer.max_steps=12"]
    run = train(
        *common,
        THREE,
        "fault.survive=true",
        "fault.respawn=0",
        f"fault.events=[{HANG},{ERROR}]",
    )
    told = " ".join(run.screen.split())
    assert "cpu:2" in told
    assert "hangs at step 4, for " in told
    assert "ordered_faults.py:" in told
    assert [(one["step"], one["device"], one["kind"]) for one in run.summary["failures"]] == [
        (4, "cpu:2", "Hung"),
        (8, "cpu:0", "AcceleratorError"),
    ]
    alone = train(*common, "strategy=single", "hardware.devices=[cpu]")
    assert run.losses == pytest.approx(alone.losses, rel=EXACT)


@pytest.mark.parametrize("strategy", ["pipeline", "local_sgd"])
def test_what_cannot_form_anew_starts_again(train: Train, strategy: str) -> None:
    """Also case 48: under local steps a lost device's samples are the others' from the last checkpoint on."""
    common = [option for option in TINY if not option.startswith(("hardware.devices", "model"))]
    run = train(
        *common,
        THREE,
        "model=mlp",
        "model.hidden_sizes=[8,8]",
        f"strategy={strategy}",
        *(("strategy.sync_every=4", "trainer.log_every=4") if strategy == "local_sgd" else ()),
        "trainer.max_steps=12",
        "trainer.checkpoint_every=4",
        "fault.survive=true",
        "fault.events=[{kind: death, device: 'cpu:1', at_step: 6}]",
    )
    assert run.summary["status"] == "completed"
    assert [device["id"] for device in run.summary["devices"]] == ["cpu:0", "cpu:2"]
    (failure,) = run.summary["failures"]
    assert (failure["device"], failure["kind"]) == ("cpu:1", "SIGKILL")
    assert 0 <= failure["steps_lost"] <= 4
    assert failure["recovered_s"] > 0
    assert "cpu:0, cpu:2 start again from step 4." in run.screen
    steps = [row["step"] for row in run.metrics if "train/loss" in row]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12


def test_a_rank_that_misses_its_peer_is_heard_first(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over several machines: the peer's end comes by a connection of its own, and may come later."""
    heard: dict[int, bool] = {}

    def wait_for_news(members: Sequence[Member], seconds: float) -> None:
        for member in members:
            if member.device.id == "cpu:1" and member.number not in heard:
                hear_late(member)
        pause_for(members, seconds)

    def hear_late(member: Member) -> None:
        process, poll, wait = member.process, member.process.poll, member.process.wait
        heard[member.number] = False

        def waited(seconds: float) -> None:
            heard[member.number] = True
            wait(seconds)

        monkeypatch.setattr(process, "poll", lambda: poll() if heard[member.number] else None)
        monkeypatch.setattr(process, "wait", waited)

    monkeypatch.setattr(launcher, "pause_for", wait_for_news)
    common = [option for option in TINY if not option.startswith(("hardware.devices", "model"))]
    run = train(
        *common,
        "hardware.devices=[cpu,cpu]",
        "model=mlp",
        "model.hidden_sizes=[8,8]",
        "strategy=pipeline",
        "trainer.max_steps=12",
        "trainer.checkpoint_every=4",
        "fault.survive=true",
        "fault.events=[{kind: death, device: 'cpu:1', at_step: 6}]",
    )
    assert run.summary["status"] == "completed"
    assert [(one["device"], one["kind"]) for one in run.summary["failures"]] == [("cpu:1", "SIGKILL")]
    assert "start again from step 4." in run.screen or "starts again from step 4." in run.screen


@pytest.mark.parametrize("method", ["forkserver", "subprocess"])
def test_who_reaches_the_store_steers_nothing(tmp_path: Path, method: str) -> None:
    run = Launched(tmp_path, *TINY, "trainer.max_steps=1000000", f"launch.start_method={method}")
    secrets = set()
    try:
        run.wait_until_training()
        plan = json.loads((run.run_dir / "plan.json").read_text())

        def attack() -> None:
            store = dist.TCPStore(plan["store_host"], plan["store_port"], is_master=False)
            for number in (1, 2, 3):
                store.set(Request.key(number), Request(number, "stop").to_json())
                store.set(answer_key(number), '{"done": true, "answer": "as you wish"}')
                store.set(Epoch.key(number), Epoch(number, (0,), plan["run_dir"]).to_json())
            for key in (LATEST, LATEST_REQUEST, "reformed/1", beat_key(1)):
                store.set(key, "3")

        with stranger(attack):
            pass
        before = run.steps()
        wait_for(lambda: run.steps() > before + 50 or run.process.poll() is not None, "50 more steps")
        assert run.process.poll() is None, run.screen
        text = " ".join(run.screen.split())
        assert text.count("`request/1` in the run's store must be signed by the run, but is not") == 1
        if method == "subprocess":
            secrets = {rank.environ()[RUN_SECRET] for rank in run.ranks()}
        assert main_control([str(run.run_dir), "checkpoint"]) == 0
        assert main_control([str(run.run_dir), "stop"]) == 0
        assert run.wait() == 1, run.screen
    finally:
        run.kill()
    assert run.summary["error"] == "stopped by hetexp control"
    assert run.summary["failures"] == []
    assert len(list((run.run_dir / "checkpoints").glob("step_*"))) >= 2
    assert len(secrets) == (method == "subprocess")
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(secret.encode() in content for secret in secrets for content in written)

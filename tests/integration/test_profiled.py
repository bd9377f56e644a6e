"""Measured shares: what is hidden is found, what slows the job is left out, and the run accounts for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import Train, difference

from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.errors import RunFailedError
from hetexp.training.measuring.calibrate import JOINT_STEPS

CARDS = """
cards:
  fast:
    name: Fast
    vendor: nvidia
    memory_gib: 8
    tflops: {float32: 6.0e-6}
    bandwidth_gb_per_second: 300
    link: pcie4x16
  slow:
    name: Slow
    vendor: intel
    memory_gib: 8
    tflops: {float32: 2.0e-6}
    bandwidth_gb_per_second: 100
    link: pcie4x16
"""
RUN = (
    "model=mlp",
    "model.hidden_sizes=[16]",
    "data=synthetic",
    "data.num_samples=2048",
    "trainer.global_batch_size=128",
    "trainer.max_steps=8",
    "trainer.max_epochs=null",
    "trainer.log_every=4",
    "hardware.devices=[emulated:fast,emulated:slow]",
    "hardware.time_scale=1",
)


@pytest.fixture
def own_cards(tmp_path: Path) -> str:
    path = tmp_path / "cards.yaml"
    path.write_text(CARDS)
    return f"hardware.catalogue={path}"


def test_hidden_speeds_are_found_and_the_weights_are_the_same(train: Train, own_cards: str) -> None:
    words = (own_cards, "hardware.deviation_seed=3", "trainer.max_steps=30")
    run = train(*RUN, *words, "balancing=profiled")
    plan = json.loads((run.folder / "plan.json").read_text())
    measured = plan["calibration"]["devices"]
    assert sum(plan["local_batch_sizes"]) == 128
    # What the split balances is what was measured, not what the catalogue says: one sample more on either
    # device would make the step longer.
    fast, slow = (SpeedCurve.from_dict(one["curve"]) for one in measured)
    first, second = plan["local_batch_sizes"]
    assert first > second > 0
    step = max(fast.seconds(first), slow.seconds(second))
    assert step <= min(slow.seconds(second + 1), fast.seconds(first + 1))
    assert all(len(one["points"]) >= 20 for one in measured)
    # The steps of all together count for each device's curve, at the share that it has in them.
    joint = [{size for size, _ in one["points"][-JOINT_STEPS:]} for one in measured]
    assert [len(sizes) for sizes in joint] == [1, 1]
    assert sum(size for sizes in joint for size in sizes) == 128
    summary = run.summary
    assert 0 < summary["efficiency"] <= 1.1
    assert sum(summary["lost_to"].values()) == pytest.approx(1 - summary["efficiency"])
    assert summary["solo_samples_per_s"] == pytest.approx(
        sum(device["solo_samples_per_s"] for device in summary["devices"])
    )
    assert summary["predicted_step_s"] > 0
    assert summary["ceiling"] <= 1.0
    assert "of the sum of what the devices do alone" in run.screen
    fastest = summary["fastest_alone"]
    assert fastest["device"] == summary["devices"][0]["id"]
    assert fastest["gain"] == pytest.approx(summary["samples_per_s"] / fastest["samples_per_s"])
    assert f"{fastest['gain']:.2f}× as fast as the" in run.screen
    # Measuring changes nothing that is learned.
    same = train(*RUN, *words)
    assert difference(run.parameters(), same.parameters()) < 1e-5


def test_what_was_measured_serves_the_next_run(train: Train, own_cards: str) -> None:
    first, second = (train(*RUN, own_cards, "balancing=profiled", "trainer.max_steps=2") for _ in range(2))
    assert (first.folder / "calibration").exists()
    assert not (second.folder / "calibration").exists()
    assert "Measuring" in first.screen and "Measuring" not in second.screen
    assert "balancing.recalibrate=true measures them again" in " ".join(second.screen.split())
    plans = [json.loads((run.folder / "plan.json").read_text()) for run in (first, second)]
    # The pace is that of the moment, and found again; that begins with the earlier one.
    before = plans[0]["calibration"]
    again = {"cached": True, "time_scale": None, "earlier_time_scale": before["time_scale"]}
    assert before | again == plans[1]["calibration"]
    assert [run.summary["calibration"]["cached"] for run in (first, second)] == [False, True]


def test_a_device_that_slows_the_job_is_left_out_with_the_reason(train: Train, own_cards: str) -> None:
    cards = "hardware.devices=[emulated:rtx_4090,emulated:arc_a380]"
    large = ("model.hidden_sizes=[512,512]", "hardware.time_scale=null")
    run = train(*RUN, own_cards, cards, *large, "balancing=profiled", "diagram=true")
    assert [device["id"] for device in run.summary["devices"]] == ["emulated:0"]
    assert run.summary["world_size"] == 1
    told = " ".join(run.screen.split())
    assert "Arc A380 (emulated)) is left out: with it a step is predicted to take" in told
    drawn = (run.folder / "plan.mmd").read_text(encoding="utf-8")
    assert "emulated:1<br/>Arc A380 (emulated)<br/>takes no part" in drawn
    assert not (run.folder / "calibration" / "plan.mmd").exists()


def test_memory_limits_the_passes_of_measured_shares(train: Train, tmp_path: Path) -> None:
    """The small card is as fast as the other and has room for a part of its half: it takes several passes."""
    path = tmp_path / "small.yaml"
    small = CARDS.replace("memory_gib: 8", "memory_gib: 0.2935", 1).replace("2.0e-6", "6.0e-6")
    path.write_text(small)
    wide = ("model.hidden_sizes=[64]", "hardware.time_scale=0.02", f"hardware.catalogue={path}")
    run = train(*RUN, *wide, "trainer.global_batch_size=2048", "balancing=profiled", "trainer.max_steps=2")
    plan = json.loads((run.folder / "plan.json").read_text())
    first, second = plan["local_batch_sizes"]
    assert first + second == 2048
    assert 900 < first < 1200
    assert 0 < plan["microbatch_sizes"][0] < 900
    assert run.summary["devices"][0]["micro_batch"] <= plan["microbatch_sizes"][0]
    needs, (card, _) = plan["memory_bytes"], plan["devices"]
    assert needs[0] <= card["memory_bytes"]


def test_one_device_is_not_measured(train: Train) -> None:
    run = train(*RUN[:-2], "hardware=cpu", "balancing=profiled")
    assert not (run.folder / "calibration").exists()
    assert run.summary["efficiency"] is None


@pytest.mark.parametrize("slower", [1.5, 3.0, 5.0])
def test_a_slow_backward_is_seen_although_the_other_rank_waits_for_it(train: Train, slower: float) -> None:
    """The exchange sits in backward: there both ranks take equally long. Nor does a slow start count."""
    run = train(
        "data=custom",
        "data._target_=faulty.Data",
        "model=custom",
        "model._target_=waiting_model.Waiting",
        f"+model.slower={slower}",
        "+model.first=0.5",
        "hardware.devices=[cpu,cpu]",
        "balancing=profiled",
        "balancing.drop_slower=false",
        "trainer.global_batch_size=60",
        "trainer.max_steps=3",
        "trainer.max_epochs=null",
    )
    plan = json.loads((run.folder / "plan.json").read_text())
    curves = [SpeedCurve.from_dict(one["curve"]) for one in plan["calibration"]["devices"]]
    assert curves[1].pass_seconds(20) / curves[0].pass_seconds(20) == pytest.approx(slower, rel=0.2)
    first, second = plan["local_batch_sizes"]
    assert first > 30 > second
    assert first / second == pytest.approx(slower, rel=0.25)  # rounding to samples included
    assert all(seconds < 0.45 for one in plan["calibration"]["devices"] for _, seconds in one["points"])


def test_a_failure_while_measuring_is_told_as_any_other(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken = ("data=custom", "data._target_=faulty.Data", "model=custom", "model._target_=faulty.Net")
    with pytest.raises(RunFailedError, match="rank 1, cpu:1 .* does not like its input"):
        train(
            *broken,
            "+model.fail_at=2",
            "hardware.devices=[cpu,cpu]",
            "balancing=profiled",
            "trainer.global_batch_size=8",
            "trainer.max_steps=2",
            folder=folder,
        )
    assert (folder / "calibration" / "logs" / "rank_1.log").exists()
    assert json.loads((folder / "calibration" / "summary.json").read_text())["status"] == "failed"

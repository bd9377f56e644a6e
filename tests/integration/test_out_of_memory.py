"""Case 15: memory runs out on one rank, and all go on together with smaller microbatches, or end together."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support import Run, Train, difference, worst

from hetexp.core.errors import RunFailedError

STEPS = 9
COMMON = (
    "data=synthetic",
    "data.num_samples=100",
    "data.num_test_samples=20",
    "data.input_shape=[4]",
    "data.num_classes=2",
    "model=custom",
    "model._target_=faulty.Hungry",
    "trainer.global_batch_size=24",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "comm.timeout_seconds=20",
    "launch.grace_seconds=2",
)
"""100 samples are 4 full batches and a short one of 4."""
BUCKETS = ("balancing=manual", "strategy.bucket_cap_mb=0.0001")
"""Each layer is a bucket of its own."""
TWO = (*BUCKETS, "hardware.devices=[cpu,cpu]", "balancing.weights=[8,16]")
THREE = (*BUCKETS, "hardware.devices=[cpu,cpu,cpu]", "balancing.weights=[4,12,8]")
ONE = ("hardware=cpu", "strategy=single")


@pytest.fixture
def undisturbed(train: Train) -> Callable[..., Run]:
    return cache(lambda *overrides: train(*COMMON, *overrides))


CASES = [
    pytest.param(ONE, ("+model.most=9", "+model.ranks=[0]", "+model.after=2"), {0: 6}, id="one-device"),
    pytest.param(TWO, ("+model.most=9",), {1: 8}, id="forward-first-step"),
    pytest.param(TWO, ("+model.most=9", "+model.where=backward"), {1: 8}, id="backward-first-step"),
    pytest.param(TWO, ("+model.most=1", "+model.after=6"), {1: 1}, id="forward-7-down-to-one"),
    pytest.param(TWO, ("+model.most=2", "+model.where=backward", "+model.after=6"), {1: 2}, id="backward-7"),
    pytest.param(
        TWO,
        ("+model.most=3", "+model.where=backward", "+model.after=13", "trainer.accumulate=2"),
        {1: 2},
        id="backward-accumulate",
    ),
    pytest.param(
        TWO,
        (
            "+model.most=3",
            "+model.after=13",
            "trainer.accumulate=2",
            "strategy.gradient_as_bucket_view=false",
        ),
        {1: 2},
        id="forward-accumulate-no-views",
    ),
    pytest.param(
        THREE,
        ("+model.most=5", "+model.where=backward", "+model.after=3", "+model.ranks=[1,2]"),
        {1: 3, 2: 4},
        id="backward-two-of-three",
    ),
    pytest.param(
        (*TWO, "+model.unused=true", "strategy.find_unused_parameters=true"),
        ("+model.most=5", "+model.where=backward", "+model.after=3"),
        {1: 4},
        id="backward-unused",
    ),
]


@pytest.mark.parametrize(("layout", "options", "limits"), CASES)
def test_all_go_on_with_smaller_microbatches(
    train: Train,
    undisturbed: Callable[..., Run],
    layout: tuple[str, ...],
    options: tuple[str, ...],
    limits: dict[int, int],
) -> None:
    run = train(*COMMON, *layout, *options)
    loss, parameters = worst(run, undisturbed(*layout), STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12
    for rank in range(len(run.summary["devices"])):
        told = [row.get(f"device/cpu:{rank}/microbatch_size") for row in run.metrics if "train/loss" in row]
        assert told[-1] == limits.get(rank)
        if rank in limits:
            assert run.summary["devices"][rank]["micro_batch"] <= limits[rank]
            log = (run.folder / "logs" / "rank_0.log").read_text()
            assert f"Rank {rank}, cpu:{rank}" in log
            assert f"From now on it is at most {limits[rank]}." in log
    saved = json.loads(next((run.folder / "checkpoints").glob(f"*{STEPS}/state.json")).read_text())
    assert [device["microbatch_limit"] for device in saved["extra"]["devices"]] == [
        limits.get(rank) for rank in range(len(run.summary["devices"]))
    ]


def test_a_resumed_run_begins_with_what_fits(train: Train, undisturbed: Callable[..., Run]) -> None:
    short = ("+model.most=9", "+model.where=backward")
    first = train(*COMMON, *TWO, *short, "trainer.max_steps=4")
    run = train(*COMMON, *TWO, *short, f"resume={first.folder}")
    assert "ran out of memory" in (first.folder / "logs" / "rank_0.log").read_text()
    assert "ran out of memory" not in (run.folder / "logs" / "rank_0.log").read_text()
    whole = undisturbed(*TWO)
    assert difference(run.parameters(), whole.parameters()) <= 1e-12


GIVING_UP = [
    pytest.param(("+model.most=0",), "in microbatches of 1 ", id="forward"),
    pytest.param(("+model.most=0", "+model.where=backward"), "in microbatches of 1 ", id="backward"),
    pytest.param(
        ("+model.most=9", "+model.where=backward", "trainer.non_finite=continue"),
        "cannot be done again",
        id="nobody-looks",
    ),
    pytest.param(
        ("+model.most=9", "strategy.static_graph=true", "trainer.drop_last=true"),
        "cannot be done again",
        id="static-graph",
    ),
    pytest.param(
        ("optimizer=sgd", "optimizer._target_=faulty.Greedy"),
        "The optimizer's update cannot be done again",
        id="optimizer",
    ),
]


@pytest.mark.parametrize(("options", "text"), GIVING_UP)
def test_all_give_up_together(train: Train, tmp_path: Path, options: tuple[str, ...], text: str) -> None:
    with pytest.raises(RunFailedError) as caught:
        train(*COMMON, *TWO, "+model.after=5", *options, folder=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert caught.value.exit_code == 1
    failures = {failure["device"]: failure for failure in summary["failures"]}
    assert failures["cpu:1"]["kind"] == "DeviceMemoryError"
    for part in ("Rank 1, cpu:1", "its share of 16 samples", "free memory is not known", "2.00 GiB", text):
        assert part in summary["error"]


PROFILED = ("hardware.devices=[cpu,cpu]", "balancing=profiled", "balancing.drop_slower=false")


def test_the_probe_answers_what_fits(train: Train) -> None:
    run = train(*COMMON, *PROFILED, "+model.most=7")
    plan = json.loads((run.folder / "plan.json").read_text())
    assert 1 <= plan["calibration"]["devices"][1]["curve"]["microbatch_size"] <= 7
    assert run.summary["devices"][1]["micro_batch"] <= 7
    assert run.summary["status"] == "completed"


def test_a_probe_of_which_nothing_fits_ends_all(train: Train, tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as caught:
        train(*COMMON, *PROFILED, "+model.most=0", folder=tmp_path / "run")
    assert caught.value.exit_code == 1
    for part in ("Rank 1, cpu:1", "in microbatches of 1", "No share fits.", "2.00 GiB"):
        assert part in str(caught.value)


def test_shares_that_move_keep_the_microbatch(train: Train, undisturbed: Callable[..., Run]) -> None:
    run = train(
        *COMMON, "hardware.devices=[cpu,cpu]", "balancing=adaptive", "+model.most=5", "+model.where=backward"
    )
    loss, parameters = worst(run, undisturbed(*TWO), STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12
    assert "Rank 1, cpu:1" in (run.folder / "logs" / "rank_0.log").read_text()
    assert run.summary["devices"][1]["micro_batch"] <= 5


@pytest.mark.parametrize("scale", ["null", "20"], ids=["in the rehearsal", "in training"])
def test_on_emulated_cards_and_paced_links(train: Train, scale: str) -> None:
    cards = (
        *BUCKETS,
        "hardware.devices=[emulated:rtx_3090,emulated:arc_a770]",
        "balancing.weights=[8,16]",
        "trainer.precision=float32",
        f"hardware.time_scale={scale}",
    )
    run = train(*COMMON, *cards, "+model.most=5", "+model.where=backward")
    loss, parameters = worst(run, train(*COMMON, *cards, "hardware.time_scale=1"), STEPS)
    assert loss <= 1e-5
    assert parameters <= 1e-5
    assert run.summary["devices"][1]["micro_batch"] == 4
    when = "before the first step" if scale == "null" else "in step 1"
    assert f"ran out of memory {when}" in (run.folder / "logs" / "rank_0.log").read_text()

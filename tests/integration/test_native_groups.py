"""Members die while a vendor's library joins them, whose collectives then hang and return wrong numbers."""

from __future__ import annotations

import math
from pathlib import Path

import hurt
import pytest
from support import Run, Train, difference, worst

STEPS = 20
COMMON = (*hurt.COMMON, "model._target_=hurt.Net")
HANGING = (
    "hardware.share_devices=true",
    "hardware.backends=[hanging.HangingBackend]",
    "strategy=ddp",
    "fault.survive=true",
    "fault.heartbeat_seconds=5",
)
TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def no_added_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is known to no other test."""
    monkeypatch.setattr("hetexp.hardware.backend._added", {})


def devices(count: int) -> str:
    return f"hardware.devices=[{','.join(f'hanging:{index}' for index in range(count))}]"


def steps_of(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics if "train/loss" in line]


@pytest.mark.parametrize(
    ("model", "fused", "log_every"),
    [("Net", True, 1), ("Apart", True, 5), ("Apart", False, 5)],
)
def test_members_die_at_any_moment(train: Train, model: str, fused: bool, log_every: int) -> None:
    """In backward, in a save and in an evaluation; one member is left, and no step is lost.

    A log line and BatchNorm let ranks meet within the step. Otherwise only the device knows that the sums
    are wrong.
    """
    steps = (f"trainer.max_steps={STEPS}", "trainer.eval_every=5", "trainer.checkpoint_every=1")
    common = (
        *COMMON,
        *steps,
        f"model._target_=hurt.{model}",
        f"optimizer.fused={fused}",
        f"trainer.log_every={log_every}",
    )
    single = train(*common, "hardware.devices=[cpu]", "strategy=single")
    hurt = train(
        *common,
        *HANGING,
        devices(4),
        "fault.respawn=0",
        "trainer.check_sync_every=1",
        "+model.kills={backward: [2, 6], save: [0, 8], evaluation: [3, 10]}",
    )
    assert steps_of(hurt) == list(range(log_every, STEPS + 1, log_every))
    if log_every == 1:  # of a longer window the mean lacks the lost members' samples
        assert worst(hurt, single, STEPS)[0] <= TOLERANCE
    for step in range(1, STEPS + 1):
        assert difference(hurt.parameters(step), single.parameters(step)) <= TOLERANCE
    for line, reference in zip(
        [line for line in hurt.metrics if "eval/loss" in line],
        [line for line in single.metrics if "eval/loss" in line],
        strict=True,
    ):
        assert math.isclose(line["eval/loss"], reference["eval/loss"], rel_tol=TOLERANCE)
    assert [failure["device"] for failure in hurt.summary["failures"]] == [
        "hanging:2",
        "hanging:0",
        "hanging:3",
    ]
    assert {failure["steps_lost"] for failure in hurt.summary["failures"]} == {0}
    assert hurt.summary["status"] == "completed"


def test_survivors_that_differ_by_a_step(train: Train) -> None:
    """One survivor has given up the group before its update, and takes the state of the one that has not."""
    steps = (f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=1", "trainer.log_every=1")
    options = ("optimizer._target_=hurt.Parting", *steps)
    single = train(*COMMON, *options, "hardware.devices=[cpu]", "strategy=single")
    parting = ("+optimizer.dies=2", "+optimizer.loses=1", "+optimizer.at=3")
    hurt = train(*COMMON, *options, *HANGING, devices(3), "fault.respawn=0", *parting)
    assert steps_of(hurt) == list(range(1, STEPS + 1))
    assert max(worst(hurt, single, STEPS)) <= TOLERANCE
    assert hurt.summary["comm"]["backend"] == "hanging"


def test_a_member_comes_back(train: Train, tmp_path: Path) -> None:
    """The others end their step, and their collectives, before they form the larger group."""
    steps, folder = 400, tmp_path / "hurt"
    last = (f"trainer.max_steps={steps}", f"trainer.checkpoint_every={steps}", "trainer.log_every=1")
    hurt = train(
        *COMMON,
        *last,
        *HANGING,
        devices(3),
        "fault.respawn=1",
        "fault.respawn_seconds=0.1",
        "+model.kills={backward: [0, 5]}",
        f"+model.slow_until={folder}/plans/epoch_2.json",
        folder=folder,
    )
    single = train(*COMMON, *last, "hardware.devices=[cpu]", "strategy=single")
    assert steps_of(hurt) == list(range(1, steps + 1))
    for loss, reference in zip(hurt.losses, single.losses, strict=True):
        assert math.isclose(loss, reference, rel_tol=TOLERANCE)
    assert difference(hurt.parameters(), single.parameters()) <= TOLERANCE
    assert "takes part from step" in hurt.screen
    assert hurt.summary["comm"]["backend"] == "hanging"

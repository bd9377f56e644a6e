"""Members of a training die, at any moment, and come back: the others go on as if nothing had been."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hurt
import pytest
from support import Run, Train, difference, worst

STEPS = 20
COMMON = (
    *hurt.COMMON,
    "model._target_=hurt.Net",
    "optimizer._target_=hurt.Parting",
    "trainer.log_every=1",
)
SURVIVING = ("strategy=ddp", "fault.survive=true", "fault.heartbeat_seconds=5")
TOLERANCE = 1e-12
StartSingle = Callable[..., Run]


def lines(run: Run, kind: str) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` that tell of steps (`train/loss`) or evaluations (`eval/loss`)."""
    return [line for line in run.metrics if kind in line]


def test_members_die_at_any_moment(train: Train, tmp_path: Path) -> None:
    """Of five only one is left, and what it tells is what one device alone tells.

    Step 3: two of those that are left differ by a step. Then in backward, in a save (the first rank, which
    writes everything), in an evaluation.
    """
    steps = (f"trainer.max_steps={STEPS}", "trainer.eval_every=5", "trainer.checkpoint_every=1")
    single = train(*COMMON, *steps, "hardware.devices=[cpu]", "strategy=single")
    hurt = train(
        *COMMON,
        *steps,
        *SURVIVING,
        "hardware.devices=[cpu,cpu,cpu,cpu,cpu]",
        "fault.respawn=0",
        "trainer.check_sync_every=1",
        "+optimizer.dies=2",
        "+optimizer.loses=1",
        "+optimizer.at=3",
        "+model.kills={backward: [4, 6], save: [0, 8], evaluation: [3, 10]}",
    )
    assert [line["step"] for line in lines(hurt, "train/loss")] == list(range(1, STEPS + 1))
    loss, parameters = worst(hurt, single, STEPS)
    assert loss <= TOLERANCE
    assert parameters <= TOLERANCE
    evaluations = lines(hurt, "eval/loss")
    assert [line["step"] for line in evaluations] == [5, 10, 15, 20]
    for mine, reference in zip(evaluations, lines(single, "eval/loss"), strict=True):
        assert mine["eval/accuracy"] == reference["eval/accuracy"]
        assert math.isclose(mine["eval/loss"], reference["eval/loss"], rel_tol=TOLERANCE)
    failures = hurt.summary["failures"]
    assert [failure["device"] for failure in failures] == ["cpu:2", "cpu:4", "cpu:0", "cpu:3"]
    assert {failure["kind"] for failure in failures} == {"SIGKILL"}
    assert {failure["steps_lost"] for failure in failures} == {0}
    assert hurt.summary["status"] == "completed"
    assert hurt.summary["steps"] == STEPS


def test_a_member_comes_back(train: Train, tmp_path: Path) -> None:
    """The first rank dies, and a process that takes its place gets all of the state from another one."""
    steps, folder = 400, tmp_path / "hurt"
    last = (f"trainer.max_steps={steps}", f"trainer.checkpoint_every={steps}")
    hurt = train(
        *COMMON,
        *last,
        *SURVIVING,
        "hardware.devices=[cpu,cpu]",
        "fault.respawn=1",
        "fault.respawn_seconds=0.1",
        "trainer.check_sync_every=1",
        "+model.kills={forward: [0, 5]}",
        f"+model.slow_until={folder}/plans/epoch_2.json",
        folder=folder,
    )
    single = train(*COMMON, *last, "hardware.devices=[cpu]", "strategy=single")
    assert [line["step"] for line in lines(hurt, "train/loss")] == list(range(1, steps + 1))
    back = [line["step"] for line in lines(hurt, "train/loss") if "device/cpu:0/share" in line]
    assert back[:5] == [1, 2, 3, 4, 5]
    assert back[5] > 6  # alone in between
    assert back[-1] == steps
    for mine, reference in zip(hurt.losses, single.losses, strict=True):
        assert math.isclose(mine, reference, rel_tol=TOLERANCE)
    assert difference(hurt.parameters(), single.parameters()) <= TOLERANCE
    assert hurt.summary["comm"]["backend"] == "shm"


@pytest.mark.parametrize("talks", [1, 5, 12])
def test_a_newcomer_dies_while_it_joins(train: Train, tmp_path: Path, talks: int) -> None:
    """It is one more lost member, wherever it is: before it meets the others, in gloo's connections, in the
    self-test of the exchange. The next one comes in."""
    folder = tmp_path / "hurt"
    hurt = train(
        *COMMON,
        *SURVIVING,
        "model._target_=dying.Newcomer",
        "trainer.max_steps=250",
        "trainer.checkpoint_every=250",
        "hardware.devices=[cpu,cpu,cpu]",
        "fault.respawn=2",
        "fault.respawn_seconds=0.1",
        "+model.kills={forward: [1, 5]}",
        f"+model.slow_until={folder}/plans/epoch_4.json",
        "+model.pause=0.1",
        "+model.dies=3",
        f"+model.talks={talks}",
        folder=folder,
    )
    assert [line["step"] for line in lines(hurt, "train/loss")] == list(range(1, 251))
    failures = hurt.summary["failures"]
    assert [failure["device"] for failure in failures] == ["cpu:1", "cpu:1"]
    assert all(failure["recovered_s"] < 20.0 for failure in failures)  # gloo alone would wait for 50 s
    assert "takes part from step" in hurt.screen


def test_a_group_that_does_not_form_is_formed_again(train: Train, tmp_path: Path) -> None:
    """Nobody is gone, and nobody's death tells the launcher of it."""
    hurt = train(
        *COMMON,
        *SURVIVING[:2],
        "fault.heartbeat_seconds=1",
        "model._target_=dying.Newcomer",
        "trainer.max_steps=12",
        "trainer.checkpoint_every=12",
        "hardware.devices=[cpu,cpu,cpu]",
        "fault.respawn=0",
        "+model.kills={forward: [1, 5]}",
        "+model.fails=2",
        folder=tmp_path / "hurt",
    )
    assert [line["step"] for line in lines(hurt, "train/loss")] == list(range(1, 13))
    (failure,) = hurt.summary["failures"]
    assert failure["device"] == "cpu:1"
    assert failure["recovered_s"] < 10.0
    assert (tmp_path / "hurt" / "plans" / "epoch_2.json").exists()

"""Cards that NCCL joins are lost, and come back: no step is lost, and the numbers are one device's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hurt import COMMON
from support import Train, difference

from hetexp.comm.connections.revocation import Revocation

TWO = ("hardware.devices=[cuda:0,cuda:1]", "strategy=ddp", "fault.survive=true")
TOLERANCE = 1e-12


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_device_sees_the_flag(when: str) -> None:
    """Also if the group is given up after the copy is queued, and before the device comes to it."""
    device = torch.device("cuda")
    revocation = Revocation()
    revocation.native = True
    assert not bool(revocation.snapshot(device))
    torch.cuda._sleep(200_000_000)
    if when == "before":
        revocation.revoke()
    seen = revocation.snapshot(device)
    revocation.revoke()
    assert bool(seen)


@pytest.mark.parametrize(("model", "moment"), [("Net", "backward"), ("Apart", "backward"), ("Apart", "save")])
def test_one_of_two_cards_dies(train: Train, model: str, moment: str) -> None:
    steps = ("trainer.max_steps=20", "trainer.checkpoint_every=1", "trainer.log_every=5")
    options = (*COMMON, *steps, f"model._target_=hurt.{model}")
    single = train(*options, "hardware.devices=[cpu]", "strategy=single")
    kills = f"+model.kills={{{moment}: [0, 7]}}"
    hurt = train(*options, *TWO, "fault.respawn=0", kills)
    saved = {int(path.name.split("_")[1]) for path in (hurt.folder / "checkpoints").glob("step_*")}
    assert len(saved) >= 19  # the lost rank may have been the one to save the step
    assert 20 in saved
    for step in saved:
        assert difference(hurt.parameters(step), single.parameters(step)) <= TOLERANCE
    assert [failure["steps_lost"] for failure in hurt.summary["failures"]] == [0]
    assert hurt.summary["status"] == "completed"


def test_one_of_two_cards_comes_back(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "hurt"
    options = (*COMMON, "model._target_=hurt.Net", "trainer.max_steps=600", "trainer.log_every=1")
    hurt = train(
        *options,
        *TWO,
        "fault.respawn=1",
        "+model.kills={forward: [1, 5]}",
        f"+model.slow_until={folder}/plans/epoch_2.json",
        folder=folder,
    )
    single = train(*options, "hardware.devices=[cpu]", "strategy=single")
    assert "takes part from step" in hurt.screen
    for loss, reference in zip(hurt.losses, single.losses, strict=True):
        assert math.isclose(loss, reference, rel_tol=TOLERANCE)
    assert hurt.summary["comm"]["backend"] == "nccl"

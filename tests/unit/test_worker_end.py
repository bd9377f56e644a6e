"""How long a rank that fails waits for its own save: the others may wait for its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support import plan_on, unbuilt_config

from hetexp.core.config import read_config
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.processes.failure import RankFailure
from hetexp.worker import HURRIED_SECONDS, _Rank, most_checkpoints, survived


class Saver:
    """Notes how long it was waited for."""

    waited: float | None = None

    def leave(self, seconds: float) -> bool:
        self.waited = seconds
        return True


def rank(survives: bool) -> tuple[_Rank, Saver]:
    saver, fault = Saver(), SimpleNamespace(stop_seconds=30.0)
    job = _Rank(plan_on([CpuBackend.describe(0)], unbuilt_config()), 0)
    config = SimpleNamespace(fault=fault)
    job.state = cast("Any", SimpleNamespace(survives=survives, saver=saver, config=config, loggers=()))
    return job, saver


@pytest.mark.parametrize(
    ("failure", "survives", "hurries"),
    [
        (RankFailure(1, "AcceleratorError", "unspecified launch failure"), True, True),
        (RankFailure(1, "RuntimeError", "CUDA error: an illegal memory access"), True, True),
        (RankFailure(1, "AcceleratorError", "unspecified launch failure"), False, False),
        (RankFailure(1, "ValueError", "the data are wrong"), True, False),
        (RankFailure(1, "PeerLostError", "another rank is gone", peer_lost=True), True, False),
    ],
)
def test_who_hurries(failure: RankFailure, survives: bool, hurries: bool) -> None:
    """A device's own failure, which others outlive; what ends the run lets the save end."""
    job, saver = rank(survives)
    assert survived(job, failure) is hurries
    if hurries:
        job.hurry()
    job.close(1)
    assert saver.waited == (HURRIED_SECONDS if hurries else 30.0)


@pytest.mark.parametrize(
    ("trainer", "most"),
    [
        ({}, 3),  # two by the clock, and the one that is written meanwhile
        ({"checkpoint_minutes": 0}, 1),
        ({"keep_last": 1, "keep_best": 0}, 2),
        ({"checkpoint_every": 10}, 9),
        ({"checkpoint_every": 10, "keep_last": 2}, 4),
        ({"fast_dev_run": 100}, 0),
    ],
)
def test_how_many_checkpoints_the_disk_must_hold(trainer: dict[str, Any], most: int) -> None:
    config = read_config(unbuilt_config(trainer=trainer))
    assert most_checkpoints(config, 10, 100) == most

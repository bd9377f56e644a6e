"""Which state counts after a loss, and which lines of the metrics are there already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fake_ranks import FakeGroup
from fake_store import SECRET

from hetexp.comm.communicator import Communicator
from hetexp.core.errors import SetupError
from hetexp.training.loop import Training
from hetexp.training.recovery.rank_recovery import RankRecovery, written_lines
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]


def agree(make_state: MakeState, *stands: dict[str, Any]) -> list[tuple[Training, int]]:
    """Return each rank's training after they have agreed, and which rank's state they took."""
    store = dist.HashStore()

    def rank(communicator: Communicator) -> tuple[Training, int]:
        state = make_state(communicator, (1.0,) * len(stands))
        mine = dict(stands[communicator.rank])
        training = Training(state, Progress(step=mine.pop("step")), ready=mine.pop("ready", True))
        training.good = replace(training.progress)
        for key, value in mine.items():
            setattr(training, key, value)
        for parameter in state.model.parameters():
            parameter.data.fill_(float(training.progress.step))
        return training, RankRecovery(store, communicator.rank, SECRET)._agree(training, store)

    return FakeGroup(len(stands)).run(rank)


def weight(training: Training) -> float:
    return float(next(training.state.model.parameters()).detach().flatten()[0])


def test_the_newest_step_counts(make_state: MakeState) -> None:
    """Rank 0 is behind, rank 2 comes new; of the others the lowest rank gives."""
    found = agree(make_state, {"step": 6}, {"step": 7}, {"step": 0, "ready": False}, {"step": 7})
    for training, donor in found:
        assert donor == 1
        assert training.progress.step == 7
        assert training.ready
        assert training.step_ended
        assert weight(training) == 7.0


def test_what_follows_a_step_is_done_again_unless_all_have_done_it(make_state: MakeState) -> None:
    done = {"step": 5, "step_ended": True, "evaluated_at": 5, "saved_at": 5}
    missed = {"step": 5, "step_ended": False, "evaluated_at": 5, "saved_at": 0}
    for training, _ in agree(make_state, done, missed):
        assert not training.step_ended
        assert training.evaluated_at == 5
        assert training.saved_at == -1
    behind = {"step": 4, "step_ended": False}
    for training, _ in agree(make_state, done, behind):
        assert training.step_ended
        assert training.saved_at == 5


def test_somebody_must_have_a_state(make_state: MakeState) -> None:
    with pytest.raises(SetupError, match="none of the members has a state"):
        agree(make_state, {"step": 0, "ready": False}, {"step": 0, "ready": False})


def test_lines_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert written_lines(path) == set()
    path.write_text(
        '{"step": 4, "train/loss": 1.0}\n{"step": 4, "eval/loss": 1.0}\n{"step": 5, "train/loss": 1.0}\n{"st'
    )
    assert written_lines(path) == {("train", 4), ("eval", 4), ("train", 5)}

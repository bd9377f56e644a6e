"""Case 39: the learning rate follows the number of the step, whoever shares it and whatever happens to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import FakeGroup
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.checkpoint.manifest import find_checkpoint
from hetexp.comm.communicator import Communicator
from hetexp.optimizer.build import schedule_factor
from hetexp.training.loop import train
from hetexp.training.nonfinite.loss_scale import LossScale
from hetexp.training.saving.resuming import resume
from hetexp.training.state import TrainState

MakeState = Callable[..., TrainState]
STEPS, RESUMED = 100, 37
EXPECTED = [0.1 * schedule_factor(step, "cosine", 0, STEPS) for step in range(STEPS)]


def rates(make_state: MakeState, weights: Sequence[float], until: int, resumed: str | None) -> list[float]:
    """Return the rate of each step; sample 5 makes the gradient of step 17 infinite."""
    inputs = torch.ones(640, 3)
    inputs[5] = float("inf")
    data = TensorDataset(inputs, torch.zeros(640, dtype=torch.int64))

    def rank(comm: Communicator) -> tuple[TrainState, int]:
        options: dict[str, Any] = {"max_steps": STEPS, "total_steps": STEPS, "schedule": "cosine"}
        state = make_state(
            comm, weights, train=data, model=nn.Linear(3, 4), accumulate=4, log_every=1, **options
        )
        state.loss_scale = LossScale()
        object.__setattr__(state.config, "resume", resumed)
        progress = resume(state)
        state.total_steps = until
        outcome = train(state, progress)
        return state, outcome.progress.skipped_steps

    state, skipped = FakeGroup(len(weights)).run(rank)[0]
    assert skipped == 1
    recorded: Any = state.loggers[0]
    return [line["train/learning_rate"] for _, line in recorded.lines if "train/learning_rate" in line]


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [5.0, 2.0, 1.0]])
def test_the_same_rates_for_any_ranks(make_state: MakeState, weights: list[float], tmp_path: Path) -> None:
    first = rates(make_state, weights, RESUMED, None)
    rest = rates(make_state, weights, STEPS, str(find_checkpoint(tmp_path)))
    assert len(first) == RESUMED
    assert first + rest == pytest.approx(EXPECTED, rel=1e-12)

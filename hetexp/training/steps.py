"""Which kind of step a strategy takes (`Strategy.steps`): one function a kind."""

from __future__ import annotations

from typing import Protocol

from hetexp.data.loader import LocalBatch
from hetexp.strategy.local_sgd.step import local_step
from hetexp.strategy.pipeline.step import staged_step
from hetexp.training.measure import StepTimer
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.state import TrainState
from hetexp.training.step import StepResult, joint_step


class StepFunction(Protocol):
    """Takes one step of the global batch, or this rank's part in it; every rank calls it."""

    def __call__(
        self, parts: TrainState, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer
    ) -> StepResult: ...


STEPS: dict[str, StepFunction] = {"joint": joint_step, "local": local_step, "staged": staged_step}


def train_step(
    parts: TrainState, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer
) -> StepResult:
    """Take a step of the kind that the strategy takes.

    Args:
        step: number of steps done.
    """
    return STEPS[parts.strategy.steps](parts, step, batch, normalizer, meter)

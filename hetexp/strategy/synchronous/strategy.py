"""The base of strategies that exchange gradients after backward, by a function of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetexp.core.config import Config
from hetexp.core.cost.calibration import Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.strategy.synchronous.exchange import GradientExchange
from hetexp.strategy.unexchanged import Unexchanged

if TYPE_CHECKING:
    import torch

    from hetexp.training.engine import Engine


class Synchronous(Unexchanged):
    """Base class: a subclass says how gradients become the one that all ranks step with.

    What surrounds the exchange is hetexp's: unequal and empty shares, memory that runs out, gradients that
    are not finite, clipping, checkpoints, evaluation and the summary. `exchange` is never called with a value
    that is not finite: such a step is left out on all ranks, or stops the run, as `trainer.non_finite` says.
    """

    exact = False
    """A subclass whose steps are those of a single device sets it to true."""

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        return []

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        exchange = self.step_exchange(inputs.estimates.exchange, inputs.plan, inputs.linked.devices)
        return inputs.exchanging(exchange).all_reduced()

    def step_exchange(self, exchange: Exchange, plan: Plan, devices: Sequence[DeviceSpec]) -> Exchange:
        """Return what a step exchanges: by default all gradients in one sum, which begins after backward."""
        return replace(exchange, buckets=((1.0, sum(size for _, size in exchange.buckets)),))

    def engine(self) -> Engine:
        from hetexp.strategy.synchronous.engine import SynchronousSteps

        return SynchronousSteps(self)

    @abstractmethod
    def exchange(self, gradient: torch.Tensor, ranks: GradientExchange) -> torch.Tensor:
        """Return the gradient that all ranks step with, the same bits on each of them.

        Args:
            gradient: this rank's part of the gradient of the global mean loss [trained elements], divided by
                the global count and free of the loss scale; zero on a rank without samples. The parts of all
                ranks add up to the exact gradient.
            ranks: sums over all ranks.
        """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors that this rank's `exchange` keeps from step to step, such as error feedback.

        hetexp saves each rank's in a checkpoint, and puts them back if a step is repeated or left out. So
        `exchange` replaces them by new tensors and changes none in place.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Keep these tensors, of an earlier `state_dict`; start afresh if there are none.

        There are none after a warm-up, and if a run is resumed on another number of ranks.
        """

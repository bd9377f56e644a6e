"""The base of strategies that exchange gradients after backward, by a function of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
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
    predicted_as = "all_reduce"

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        return []

    def engine(self) -> Engine:
        from hetexp.strategy.synchronous.engine import SynchronousSteps

        return SynchronousSteps(self.exchange)

    @abstractmethod
    def exchange(self, gradient: torch.Tensor, ranks: GradientExchange) -> torch.Tensor:
        """Return the gradient that all ranks step with, the same bits on each of them.

        Args:
            gradient: this rank's part of the gradient of the global mean loss [trained elements], zero on a
                rank without samples. The parts of all ranks add up to the exact gradient.
            ranks: sums over all ranks.
        """

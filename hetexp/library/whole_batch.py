"""What a script's loop sees of the other ranks' samples, for a loss that couples samples."""

from __future__ import annotations

import torch

from hetexp.comm.communicator import Communicator
from hetexp.core.errors import UsageError
from hetexp.library.step import ScriptStep
from hetexp.training.state import TrainState


class WholeBatch:
    """The part of `Run` that gathers features of the whole batch."""

    _state: TrainState
    _step: ScriptStep | None
    _features: Communicator | None = None
    """Gathers features, in an order of its own beside the exchange of gradients."""

    def gather(self, features: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks' samples of the step, in the order of the global batch.

        For a loss that couples samples, such as a contrastive one. The gradient of the result is that of all
        ranks' losses. So `backward` is called as ever, with a loss over this rank's rows (`rows`), or over
        all rows, the same on every rank: either way the gradient is that of one device.

        Every rank calls it for the same features in the same order, between `model` and `backward`. If the
        features have gradients, the loss must depend on them on every rank.

        Args:
            features: [this rank's samples, …], computed from the output of `model`, or labels of the samples.

        Returns:
            [samples of the whole batch, …].

        Raises:
            UsageError: no batch is under way, or a rank takes it in several microbatches.
        """
        step = self._step
        if step is None or step.is_over:
            raise UsageError("run.gather must be called in a loop over run.batches(), before run.backward.")
        if self._features is None:
            self._features = self._state.communicator.duplicate()
        return step.gather(features, self._features)

    @property
    def rows(self) -> slice:
        """This rank's rows in what `gather` returns, those of its samples."""
        if self._step is None:
            raise UsageError("run.rows must be read within a loop over run.batches().")
        return self._step.own_rows

"""Hooks of a model between steps: to keep a constraint, count over all samples, or change weights.

A model that derives from `ModelHooks` defines the methods that it needs. The loop calls them on every rank:

1. `project_gradients`, with the exchanged gradient of the step, before clipping and the update;
2. `after_update`, after each update of the weights, and after each merge of ranks' weights (`local_sgd`);
3. `after_step`, with facts about all samples since the last call, equal on all ranks.

The inputs of `after_step` are summed or gathered over all ranks before any rank changes its weights. So all
ranks decide alike for any number and shares of ranks, and an aborted step has changed nothing. State belongs
into buffers, which are in checkpoints and are sent to ranks that join later. An integer buffer must change in
`after_step` only, so that ranks that train independently between two merges hold the same one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Probe:
    """Training samples that were drawn and scored, the same on every rank."""

    scores: Tensor
    """[samples], float64, on the host."""
    take: Callable[[Sequence[int]], Tensor]
    """Maps places in `scores` to the inputs of these samples, on the host, in float64."""
    random: np.random.Generator
    """Generator with equal draws on every rank; its seed depends on the run's seed and the step only."""


@dataclass(frozen=True)
class Shared:
    """Facts about the steps since the last call, equal on all ranks."""

    step: int
    """Optimizer steps done, this one included."""
    before: int
    """Steps done at the last call: one less, or several less if ranks merge only every few steps."""
    samples: int
    """Samples trained on since then, of all ranks."""
    tally: Tensor
    """[`tally_size`], int64, on the rank's device: sum of the outputs' `tally` over these samples."""
    probe: Probe | None = None
    """`None` unless `probe_size` asked for samples."""


class ModelHooks:
    """Base of models with hooks between steps; every method does nothing by default."""

    tally_size: int = 0
    """Length of the `tally` that comes with each sample's output while training (`WithAuxiliary`)."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Names of the values that `metrics` returns."""

    def project_gradients(self) -> None:
        """Change the gradient of the whole batch in place, linearly, since it may contain a loss scale.

        If ranks take independent steps, it is each rank's own gradient.
        """

    def after_update(self) -> None:
        """Project the weights onto the model's constraint; the result must depend on the weights only."""

    def probe_size(self, shared: Shared) -> int:
        """Return the number of training samples to draw and score for `after_step`; 0: none."""
        return 0

    def scores(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return a score of each training sample, [batch], which must not depend on the other samples."""
        raise NotImplementedError

    def after_step(self, shared: Shared, optimizer: torch.optim.Optimizer) -> None:
        """Use the facts of all ranks; the weights are those after the update (and the merge)."""

    def measure(self, inputs: Tensor, targets: Tensor, output: object) -> Tensor | None:
        """Return sums over a batch of the evaluation as a float64 vector of fixed length.

        They are added up over all batches of all ranks.
        """
        return None

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return metrics of the evaluation beside the loss, computed from the sums and shared state."""
        return {}


NO_HOOKS = ModelHooks()
"""The hooks of a model that defines none."""


def reset_moments(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, places: Tensor, dim: int = 0
) -> None:
    """Reset an optimizer's state, such as Adam's moments, of some rows of a parameter.

    Args:
        places: places of the rows along `dim`.
    """
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
            value.index_fill_(dim, places.to(value.device), 0)


def __getattr__(name: str) -> Any:
    """Return `ModelHooks` by its earlier name, `StepHooks`, with a warning."""
    if name != "StepHooks":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("`hetexp.model.hooks.StepHooks` is now `ModelHooks`.", FutureWarning, stacklevel=2)
    return ModelHooks

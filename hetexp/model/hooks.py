"""Hooks of a model between steps: hold a constraint, count over all samples, change weights by itself.

A model that derives from `ModelHooks` defines those methods that it needs. The loop calls them on every rank:

1. `project_gradients`, with the exchanged gradient of the step, before clipping and the update;
2. `after_update`, after each update of the weights, and after each merge of ranks' weights (`local_sgd`);
3. `after_step`, with what all ranks know of all samples since the last call.

What `after_step` decides on is summed or gathered over all ranks before any of them changes its weights, so
that all decide alike whatever their number and shares, and a step that breaks off has changed nothing. State
belongs into buffers: these are in checkpoints, and newcomers of a run get them. An integer buffer must change
in `after_step` only, so that ranks that train apart between two merges hold the same one.
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
    """From places in `scores` to the inputs of these samples, on the host, in float64."""
    random: np.random.Generator
    """Draws the same on every rank; a function of the run's seed and the step alone."""


@dataclass(frozen=True)
class Shared:
    """What every rank knows of the steps since the last call; the same on all of them."""

    step: int
    """Optimizer steps done, this one included."""
    before: int
    """Steps done at the last call: one less, or several if ranks meet only now and then."""
    samples: int
    """Samples trained on since then, of all ranks."""
    tally: Tensor
    """[`tally_size`], int64, on the rank's device: what the outputs' `tally` add up to over these samples."""
    probe: Probe | None = None
    """`None` unless `probe_size` asked for samples."""


class ModelHooks:
    """Base of models that do something between steps; every method does nothing by default."""

    tally_size: int = 0
    """Length of the `tally` that comes with each sample's output while training (`WithAuxiliary`)."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Names of what `metrics` returns."""

    def project_gradients(self) -> None:
        """Change the gradient of the whole batch in place; linearly, since a loss scale may be in it.

        If ranks take steps of their own, it is each one's own gradient.
        """

    def after_update(self) -> None:
        """Bring the weights to where they must be; a function of the weights alone."""

    def probe_size(self, shared: Shared) -> int:
        """Return how many training samples are to be drawn and scored for `after_step`, 0 for none."""
        return 0

    def scores(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return a number for each of some training samples, [batch]; it must not depend on the others."""
        raise NotImplementedError

    def after_step(self, shared: Shared, optimizer: torch.optim.Optimizer) -> None:
        """Take in what all ranks know; the weights are those after the update (and the merge)."""

    def measure(self, inputs: Tensor, targets: Tensor, output: object) -> Tensor | None:
        """Return sums over a batch of the evaluation, one vector of the same length always, float64.

        They are added up over all batches of all ranks, whatever these are.
        """
        return None

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return what to tell of the evaluation beside the loss: of the sums and of shared state."""
        return {}


def reset_moments(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, places: Tensor, dim: int = 0
) -> None:
    """Reset what an optimizer keeps of some rows of a parameter, as Adam's moments.

    Args:
        places: of the rows along `dim`.
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

"""Calls the hooks of a model that acts between steps (`hetexp.model.hooks`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetexp.comm.communicator import Communicator
from hetexp.data.loader import chop, cut
from hetexp.hardware.emulation.pacing import tensors
from hetexp.model.hooks import NO_HOOKS, ModelHooks, Probe, Shared

if TYPE_CHECKING:
    from hetexp.training.state import TrainState

PROBED_AT_ONCE = 4096
"""Most samples of a scoring pass if the configuration sets no limit."""


def no_tally(state: TrainState) -> torch.Tensor | None:
    """Return a tally of no samples; `None` if the model counts nothing."""
    size = state.hooks.tally_size
    return torch.zeros(size, dtype=torch.int64, device=state.device) if size else None


def share(
    state: TrainState,
    step: int,
    tally: torch.Tensor | None,
    num_samples: int,
    before: int | None = None,
    among: Communicator | None = None,
) -> Shared | None:
    """Add up the tallies of a step's samples and draw a probe; all ranks call it before any weights change.

    Args:
        step: number of steps done.
        tally: of this rank's samples.
        num_samples: of all ranks.
        before: number of steps done at the last call; `None`: `step`.
        among: the ranks that train the model, if these are not all; it then sees no samples of others.

    Returns:
        The same on every rank; `None` if the model has no hooks.

    Raises:
        PeerLostError: another rank is gone.
    """
    hooks = state.hooks
    if hooks is NO_HOOKS:
        return None
    if tally is None:
        tally = torch.zeros(0, dtype=torch.int64)
    else:
        tally = (among or state.communicator).all_reduce(tally)  # on the device if it can: no host waits then
    shared = Shared(step + 1, step if before is None else before, num_samples, tally)
    # A step below 0 is a warm-up, which is undone.
    size = hooks.probe_size(shared) if step >= 0 and among is None else 0
    return replace(shared, probe=_probe(state, hooks, step, size)) if size else shared


def conclude(state: TrainState, shared: Shared | None) -> None:
    """Call the model's hooks after an update that all ranks have taken; no rank waits for another."""
    if state.hooks is NO_HOOKS:
        return
    with torch.no_grad():
        state.hooks.after_update()
        if shared is not None:
            state.hooks.after_step(shared, state.optimizer)


def project(state: TrainState) -> None:
    """Call the model's hook that changes the gradient."""
    if state.hooks is NO_HOOKS:
        return
    with torch.no_grad():
        state.hooks.project_gradients()


def _probe(state: TrainState, hooks: ModelHooks, step: int, size: int) -> Probe:
    """Draw training samples and score them, each rank a part of them."""
    total = len(state.train_data)  # type: ignore[arg-type]
    random = np.random.default_rng([state.config.trainer.seed, step])
    drawn = np.sort(random.choice(total, min(size, total), replace=False)).tolist()
    first, end = state.balancer.now(len(drawn)).bounds(state.rank)
    scores = torch.zeros(len(drawn), dtype=torch.float64)
    limit = state.microbatch_limits[state.rank] or state.microbatch_size or PROBED_AT_ONCE
    for places in chop(range(first, end), cut(end - first, 1, limit)):
        inputs, targets = _read(state, [drawn[place] for place in places])
        with torch.no_grad(), state.autocast():
            part = hooks.scores(state.to_device(inputs), state.to_device(targets))
        scores[places[0] : places[-1] + 1] = part.double().cpu()
    scores = state.communicator.all_reduce(scores)

    def take(places: Sequence[int]) -> torch.Tensor:
        inputs, _ = _read(state, [drawn[place] for place in places])
        return next(iter(tensors(inputs))).double()

    return Probe(scores, take, random)


def _read(state: TrainState, indices: list[int]) -> Any:
    """Return these samples of the training data, collated, on the host."""
    return state.collate.load(state.train_data, indices)

"""Finds the samples that make a step's gradient non-finite, and restores the buffers that it changed.

The search runs before a run ends with an error, or once under `trainer.non_finite=skip`. The rank computes
the step's passes again and halves those that are not finite until single samples are left. Batch norms use
their running statistics meanwhile, so that a single sample has a result; random states are restored. A model
that counts its passes counts these, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetexp.core.call import call_model
from hetexp.core.errors import logged
from hetexp.data.loader import LocalBatch
from hetexp.training.nonfinite.loss_scale import all_finite
from hetexp.training.nonfinite.samples import ALONE, MOST_NAMED, NOT_FOUND, TOGETHER, WIDTH, NonFiniteSamples
from hetexp.training.recovery.oom_recovery import part_of, split_indices, split_microbatches
from hetexp.training.state import TrainState


class KeptBuffers:
    """A copy of a model's buffers from before a step, in case the step is skipped or done again.

    A forward pass changes running statistics at once. The copy is made at every step and takes as much memory
    as the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def put_back(self) -> None:
        """Restore the buffers."""
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)

    @contextmanager
    def put_back_on_error(self) -> Iterator[None]:
        """Restore the buffers if the block breaks off, as when another rank is lost."""
        try:
            yield
        except BaseException:
            self.put_back()
            raise


def explain(
    state: TrainState,
    step: int,
    batch: LocalBatch,
    loss_sum: torch.Tensor,
    losses: list[torch.Tensor],
    factor: float,
) -> str:
    """Return the message about a step whose gradient is not finite, the same on every rank; all call it.

    Args:
        step: number of the step, counted from 1.
        batch: of this rank, in that step.
        loss_sum: of this rank.
        losses: each microbatch's part of it; empty if they were not kept.
        factor: of the losses before backward.
    """
    world, rank = state.communicator.world_size, state.rank
    sums_table = torch.zeros(world, dtype=torch.float64)
    sums_table[rank] = float(loss_sum)
    sums = state.communicator.all_reduce(sums_table).tolist()
    bad_loss = [not math.isfinite(value) for value in sums]
    local = NonFiniteSamples()
    if state.engine.computes_loss and (bad_loss[rank] or not any(bad_loss)):
        with state.communicator.working():
            local = search(state, _suspects(state, batch, losses, bad_loss[rank]), factor, bad_loss[rank])
    state.communicator.meet()  # one rank's search may take long
    rows = torch.zeros((world, WIDTH), dtype=torch.float64)
    rows[rank] = torch.tensor(local.to_row(), dtype=torch.float64)
    reports = [NonFiniteSamples.from_row(row) for row in state.communicator.all_reduce(rows).tolist()]
    names = [name for name, _ in state.model.named_parameters()]
    blamed = any(report.what == ALONE for report in reports)
    reasons = [
        _of_loss(state, rank, value, report, blamed) if bad else _of_gradient(state, rank, report, names)
        for rank, (value, bad, report) in enumerate(zip(sums, bad_loss, reports, strict=True))
        if bad or (not any(bad_loss) and report.what != NOT_FOUND)
    ]
    if any(bad_loss):
        cause = f"the loss is {'; '.join(reasons)}"
    elif reasons:
        cause = f"every loss is finite, but {'; '.join(reasons)}"
    else:
        cause = "every loss is finite; computed again, each rank's own gradient is, too"
    return f"The gradient of step {step} is not finite{_first(state)}, and {cause}."


def _first(state: TrainState) -> str:
    """Return the name of the first parameter whose exchanged gradient is not finite, in parentheses."""
    for name, parameter in state.model.named_parameters():
        if parameter.grad is not None and not all_finite([parameter.grad]):
            return f" (first in {name})"
    return ""


def _of_loss(state: TrainState, rank: int, value: float, report: NonFiniteSamples, blamed: bool) -> str:
    where = f"{value} on rank {rank}, {state.plan.devices[rank]}"
    if report.what == ALONE:
        return f"{where}, because of {report.words()}"
    if report.what == TOGETHER and blamed:  # statistics over the whole batch carry it from rank to rank
        return f"{where}, whose samples alone give a finite one"
    if report.what == TOGETHER:
        return f"{where}, in a pass over {report.words()}, of which none is so alone"
    return where


def _of_gradient(state: TrainState, rank: int, report: NonFiniteSamples, names: list[str]) -> str:
    which = f"first in {names[report.parameter]}" if report.parameter >= 0 else "nor is its loss, this time"
    how = "because of" if report.what == ALONE else "in a pass over"
    return (
        f"rank {rank}'s own gradient, on {state.plan.devices[rank]}, is not ({which}), {how} {report.words()}"
    )


def _suspects(
    state: TrainState, batch: LocalBatch, losses: list[torch.Tensor], of_loss: bool
) -> list[tuple[Any, list[int]]]:
    """Return the microbatches to search, with the places of their samples; none if those are unknown."""
    limit = state.microbatch_limits[state.rank]
    microbatches = split_microbatches(batch.microbatches, limit)
    indices = split_indices(batch.indices, limit)
    if len(microbatches) != len(indices):
        return []
    suspects = list(zip(microbatches, indices, strict=True))
    if of_loss and len(losses) == len(suspects):
        finite = [math.isfinite(float(loss)) for loss in losses]
        return [suspect for suspect, is_finite in zip(suspects, finite, strict=True) if not is_finite]
    return suspects


def search(
    state: TrainState, suspects: list[tuple[Any, list[int]]], factor: float, of_loss: bool
) -> NonFiniteSamples:
    """Search this rank's samples; an error meanwhile ends the search, so that the run's own is reported.

    Args:
        suspects: microbatches, each with the places of its samples in the training data.
        factor: of the losses before backward.
        of_loss: whether the loss is not finite; otherwise gradients are checked.
    """
    is_finite = _FiniteCheck(state, None if of_loss else factor)
    # Memory may run out, or the model refuse a single sample.
    with logged("no samples are named for the NaN or infinity", logging.WARNING), for_single_samples(state):
        return _narrow(suspects, is_finite, of_loss)
    return NonFiniteSamples()


def _narrow(
    suspects: list[tuple[Any, list[int]]], is_finite: _FiniteCheck, of_loss: bool
) -> NonFiniteSamples:
    alone: list[int] = []
    together: list[int] = []
    for microbatch, indices in suspects:
        runs = list(_smallest(microbatch, indices, is_finite, MOST_NAMED + 1 - len(alone)))
        alone += [index for run in runs if len(run) == 1 for index in run]
        together += [index for run in runs if len(run) > 1 for index in run]
        if of_loss and not runs:  # the loss was not finite in the step, and is finite now
            together += indices
        if len(alone) > MOST_NAMED:
            break
    samples = sorted(alone or together)
    what = ALONE if alone else TOGETHER if together else NOT_FOUND
    return NonFiniteSamples(what, samples[:MOST_NAMED], len(samples), is_finite.parameter)


def _smallest(
    microbatch: Any, indices: list[int], is_finite: Callable[[Any, int], bool], most: int
) -> Iterator[list[int]]:
    """Yield at most `most` of the smallest runs of samples, by halving, that are not finite."""
    if most < 1 or is_finite(microbatch, len(indices)):
        return
    half, count = len(indices) // 2, 0
    if half:
        for start, end in ((0, half), (half, len(indices))):
            part = part_of(microbatch, start, end)
            for run in _smallest(part, indices[start:end], is_finite, most - count):
                count += 1
                yield run
    if not count:
        yield indices


class _FiniteCheck:
    """Computes a pass again, without any exchange, and checks that it is finite.

    Args:
        factor: of the loss, to check the gradient as well; `None`: check the loss only.
    """

    def __init__(self, state: TrainState, factor: float | None) -> None:
        self._state, self._factor = state, factor
        self._trained = [(n, p) for n, p in enumerate(state.model.parameters()) if p.requires_grad]
        self.parameter = -1
        """Number of the first parameter whose gradient was not finite; -1: none."""

    def __call__(self, microbatch: Any, num_samples: int) -> bool:
        state, (inputs, targets) = self._state, microbatch
        with torch.set_grad_enabled(self._factor is not None), state.autocast():
            output = call_model(state.model, state.to_device(inputs))
            total = state.local_loss(output, targets, num_samples)
        finite = math.isfinite(float(total.detach()))
        if self._factor is None or not finite:
            return finite
        # Not `backward`: that would wake the hooks by which the ranks exchange.
        parameters = [parameter for _, parameter in self._trained]
        gradients = torch.autograd.grad(total * self._factor, parameters, allow_unused=True)
        for (number, _), gradient in zip(self._trained, gradients, strict=True):
            if gradient is not None and not all_finite([gradient]):
                if self.parameter < 0:
                    self.parameter = number
                return False
        return True


@contextmanager
def for_single_samples(state: TrainState) -> Iterator[None]:
    """Let batch norms use their running statistics in the block; restore modes and random states."""
    device = state.device
    devices = [device.index or 0] if device.type in ("cuda", "xpu") else []
    over_batch = [m for m in state.model.modules() if getattr(m, "running_mean", None) is not None]
    modes = [module.training for module in over_batch]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            for module in over_batch:
                module.training = False
            yield
        finally:
            for module, training in zip(over_batch, modes, strict=True):
                module.training = training

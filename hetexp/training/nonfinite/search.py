"""A step whose gradient is not finite: what it must not harm, and which samples on which device made it so.

Everything here but `KeptBuffers` runs on the way to the end of a run, or once under
`trainer.non_finite=skip`: the rank computes again, pass by pass, what the step had computed, halving what is
not finite until single samples are left. Batch norms then use their running statistics, so that a sample
alone has a result; random states are put back. A model that counts its passes counts these, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetexp.core.call import call_model
from hetexp.data.loader import LocalBatch
from hetexp.training.nonfinite.loss_scale import all_finite
from hetexp.training.nonfinite.samples import ALONE, MOST_NAMED, NOT_FOUND, TOGETHER, WIDTH, NonFiniteSamples
from hetexp.training.recovery.oom_recovery import part_of, split_indices, split_microbatches
from hetexp.training.state import TrainState


class KeptBuffers:
    """A model's buffers as they were before a step, for the case that it is left out or done again.

    A forward pass changes running statistics at once, whatever becomes of the step. The copy costs the
    buffers' bytes once more and is made at every step; a model without buffers pays nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def put_back(self) -> None:
        """Give the buffers the values that they had."""
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)

    @contextmanager
    def put_back_on_error(self) -> Iterator[None]:
        """Surround what may break off, as where another rank is lost; the step is then done again."""
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
    """Return the message about a step whose gradient is not finite; all ranks call it, and get the same.

    Args:
        step: number of the step, counted from 1.
        batch: of this rank, in that step.
        loss_sum: of this rank.
        losses: of it each microbatch's own; empty where they were not kept.
        factor: what they were multiplied by before backward.
    """
    world, rank = state.communicator.world_size, state.rank
    own = torch.zeros(world, dtype=torch.float64)
    own[rank] = float(loss_sum)
    sums = state.communicator.all_reduce(own).tolist()
    bad_loss = [not math.isfinite(value) for value in sums]
    found = NonFiniteSamples()
    if state.engine.computes_loss and (bad_loss[rank] or not any(bad_loss)):
        with state.communicator.working():
            found = search(state, _suspects(state, batch, losses, bad_loss[rank]), factor, bad_loss[rank])
    state.communicator.meet()  # the search may have taken one of them its time
    rows = torch.zeros((world, WIDTH), dtype=torch.float64)
    rows[rank] = torch.tensor(found.to_row(), dtype=torch.float64)
    everyone = [NonFiniteSamples.from_row(row) for row in state.communicator.all_reduce(rows).tolist()]
    names = [name for name, _ in state.model.named_parameters()]
    blamed = any(one.what == ALONE for one in everyone)
    reasons = [
        _of_loss(state, one, value, everyone[one], blamed)
        if bad
        else _of_gradient(state, one, everyone[one], names)
        for one, (value, bad) in enumerate(zip(sums, bad_loss, strict=True))
        if bad or (not any(bad_loss) and everyone[one].what != NOT_FOUND)
    ]
    if any(bad_loss):
        cause = f"the loss is {'; '.join(reasons)}"
    elif reasons:
        cause = f"every loss is finite, but {'; '.join(reasons)}"
    else:
        cause = "every loss is finite; computed again, each rank's own gradient is, too"
    return f"The gradient of step {step} is not finite{_first(state)}, and {cause}."


def _first(state: TrainState) -> str:
    """Name the first parameter whose exchanged gradient is not finite."""
    for name, parameter in state.model.named_parameters():
        if parameter.grad is not None and not all_finite([parameter.grad]):
            return f" (first in {name})"
    return ""


def _of_loss(state: TrainState, rank: int, value: float, found: NonFiniteSamples, blamed: bool) -> str:
    where = f"{value} on rank {rank}, {state.plan.devices[rank]}"
    if found.what == ALONE:
        return f"{where}, because of {found.words()}"
    if found.what == TOGETHER and blamed:  # statistics over the whole batch carry it from rank to rank
        return f"{where}, whose samples alone give a finite one"
    if found.what == TOGETHER:
        return f"{where}, in a pass over {found.words()}, of which none is so alone"
    return where


def _of_gradient(state: TrainState, rank: int, found: NonFiniteSamples, names: list[str]) -> str:
    which = f"first in {names[found.parameter]}" if found.parameter >= 0 else "nor is its loss, this time"
    how = "because of" if found.what == ALONE else "in a pass over"
    return (
        f"rank {rank}'s own gradient, on {state.plan.devices[rank]}, is not ({which}), {how} {found.words()}"
    )


def _suspects(
    state: TrainState, batch: LocalBatch, losses: list[torch.Tensor], of_loss: bool
) -> list[tuple[Any, list[int]]]:
    """Return the microbatches to look at, with the places of their samples; none where not known."""
    limit = state.microbatch_limits[state.rank]
    passes = split_microbatches(batch.microbatches, limit)
    indices = split_indices(batch.indices, limit)
    if len(passes) != len(indices):
        return []
    suspects = list(zip(passes, indices, strict=True))
    if of_loss and len(losses) == len(suspects):
        kept = [math.isfinite(float(loss)) for loss in losses]
        return [one for one, finite in zip(suspects, kept, strict=True) if not finite]
    return suspects


def search(
    state: TrainState, suspects: list[tuple[Any, list[int]]], factor: float, of_loss: bool
) -> NonFiniteSamples:
    """Look for the samples on this rank; whatever goes wrong on the way, the run's own error is reported.

    Args:
        suspects: microbatches, each with the places of its samples in the training data.
        factor: what losses were multiplied by before backward.
        of_loss: whether the loss is not finite; else the gradient is looked at.
    """
    judge = _Judge(state, None if of_loss else factor)
    try:
        with _as_alone(state):
            return _narrow(suspects, judge, of_loss)
    except Exception:  # memory, a model that refuses one sample: then they are not named
        return NonFiniteSamples()


def _narrow(suspects: list[tuple[Any, list[int]]], judge: _Judge, of_loss: bool) -> NonFiniteSamples:
    alone: list[int] = []
    together: list[int] = []
    for (inputs, targets), indices in suspects:
        found = list(_smallest(inputs, targets, indices, judge, MOST_NAMED + 1 - len(alone)))
        alone += [index for one in found if len(one) == 1 for index in one]
        together += [index for one in found if len(one) > 1 for index in one]
        if of_loss and not found:  # it was not finite in the step, and is so now
            together += indices
        if len(alone) > MOST_NAMED:
            break
    samples = sorted(alone or together)
    what = ALONE if alone else TOGETHER if together else NOT_FOUND
    return NonFiniteSamples(what, samples[:MOST_NAMED], len(samples), judge.parameter)


def _smallest(
    inputs: Any, targets: Any, indices: list[int], judge: Callable[[Any, Any], bool], most: int
) -> Iterator[list[int]]:
    """Yield the smallest runs of samples, found by halving, that are not finite; at most so many."""
    if most < 1 or judge(inputs, targets):
        return
    half, count = len(indices) // 2, 0
    if half:
        for start, end in ((0, half), (half, len(indices))):
            pieces = part_of(inputs, start, end), part_of(targets, start, end)
            for one in _smallest(*pieces, indices[start:end], judge, most - count):
                count += 1
                yield one
    if not count:
        yield indices


class _Judge:
    """Computes a pass again, without any exchange, and tells whether it is finite.

    Args:
        factor: of the loss, where the gradient is asked for; `None`: only the loss is.
    """

    def __init__(self, state: TrainState, factor: float | None) -> None:
        self._state, self._factor = state, factor
        self._trained = [(n, p) for n, p in enumerate(state.model.parameters()) if p.requires_grad]
        self.parameter = -1
        """Number of the first parameter whose gradient was found not to be finite."""

    def __call__(self, inputs: Any, targets: Any) -> bool:
        state = self._state
        with torch.set_grad_enabled(self._factor is not None), state.autocast():
            total = state.local_loss(call_model(state.model, state.to_device(inputs)), targets)
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
def _as_alone(state: TrainState) -> Iterator[None]:
    """Let normalisations over the batch use their running statistics; put modes and random states back."""
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

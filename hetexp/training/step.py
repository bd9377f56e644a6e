"""One guarded optimizer step, the same for every strategy.

The strategy's engine computes the gradient. This module does the rest: it recovers from out-of-memory errors
and from values that are not finite, restores buffers, clips the gradient and updates the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetexp.optimizer.build import restart_schedule
from hetexp.training.engine import StepResult
from hetexp.training.gradient import Gradient
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.model_hooks import project
from hetexp.training.nonfinite.grad_check import GradCheck, may_be_skipped, skip_if_nonfinite
from hetexp.training.nonfinite.loss_scale import with_values
from hetexp.training.nonfinite.search import KeptBuffers
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import fatal_out_of_memory, sizes_of
from hetexp.training.state import TrainState


class TakesGradient(Protocol):
    """Computes the gradient of a step on all ranks, and shrinks microbatches if memory runs out."""

    def gradient(
        self, step: int, microbatches: list[Any], normalizer: LossNormalizer, meter: StepTimer
    ) -> Gradient:
        """Leave the gradient of the step in the parameters' `grad`, summed over all ranks that step together.

        If the ranks must agree on anything before one of them changes its weights, they do so here.
        """
        ...

    def smaller(self, step: int, microbatches: list[Any], gradient: Gradient) -> list[Any] | None:
        """Return the microbatches to try again with after a step that is not finite.

        Returns:
            `None` if no rank ran out of memory.
        """
        ...


@dataclass
class Guarded:
    """An optimizer step that is done or skipped."""

    gradient: Gradient
    microbatches: list[Any]
    """Those of the last attempt."""
    finite: bool
    recoverable: bool
    """Whether the gradient is finite, or a smaller loss scale may make it so."""
    grad_norm: torch.Tensor | None
    learning_rate: float

    def result(self, **more: Any) -> StepResult:
        """Return the step's result for the training loop."""
        gradient = self.gradient
        return StepResult(
            loss_sum=gradient.loss_sum,
            global_count=gradient.global_count,
            grad_norm=self.grad_norm,
            learning_rate=self.learning_rate,
            skipped=not self.finite,
            unrecoverable=not self.recoverable,
            losses=gradient.losses,
            factor=gradient.factor,
            **more,
        )


def guarded_step(
    state: TrainState,
    engine: TakesGradient,
    step: int,
    microbatches: list[Any],
    normalizer: LossNormalizer,
    meter: StepTimer,
) -> Guarded:
    """Take one optimizer step; take it again with smaller microbatches if memory runs out.

    A gradient that is not finite changes only the loss scale. The learning rate does not change here
    (`advance_schedule`).

    Raises:
        DeviceMemoryError: memory ran out, and smaller microbatches cannot help.
    """
    keeps = (state.checks_finite or state.survives) and state.has_buffers
    buffers = KeptBuffers(state.model) if keeps else None
    grad_norm = None
    while True:
        bookmark = meter.bookmark()
        with nullcontext() if buffers is None else buffers.put_back_on_error():
            gradient = engine.gradient(step, microbatches, normalizer, meter)
        state.backend.begin_update()
        project(state)
        owners = [p for p in state.parameters if p.grad is not None]
        gradients = [p.grad for p in owners if p.grad is not None]
        check = None
        if gradient.finite is None:
            if normalizer.loss_scale is not None:
                normalizer.loss_scale.unscale(gradients)
            check = GradCheck(state, gradients, state.checks_finite or normalizer.loss_scale is not None)
        # Queued before this rank knows whether the gradient is finite, so that the device need not wait.
        ahead = (
            check is not None
            and check.bad is not None
            and gradient.shortage is None
            and gradient.updates
            and may_be_skipped(state)
        )
        if ahead:
            assert check is not None
            grad_norm = clip(state, gradients, True, bad=check.bad)
            update(state, step, microbatches, check.bad)
            if not state.config.trainer.check_sync_every:  # that compares gradients, too
                set_gradients(owners, [None] * len(owners))  # now, while the device is busy
        with nullcontext() if buffers is None else buffers.put_back_on_error():
            if check is not None and state.while_waiting is not None:
                state.while_waiting()
            finite = gradient.finite if check is None else check.finite()
        finite = bool(finite) and gradient.shortage is None
        if finite:
            break
        if ahead:
            set_gradients(owners, gradients)
        if buffers is not None:
            buffers.put_back()
        smaller = engine.smaller(step, microbatches, gradient)
        if smaller is None:
            break
        microbatches = smaller
        meter.back_to(bookmark)
        gradients.clear()  # the memory is needed
    recoverable = normalizer.loss_scale.update(finite) if normalizer.loss_scale is not None else finite
    if not ahead:
        # After the exchange: every rank clips the gradient of the whole batch.
        grad_norm = clip(state, gradients, finite, gradient.norm)
        if finite and gradient.updates:
            update(state, step, microbatches)
    rate = float(state.optimizer.param_groups[0]["lr"])
    return Guarded(gradient, microbatches, finite, recoverable, grad_norm, rate)


def set_gradients(owners: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Set the gradients of parameters; `None` removes one."""
    for parameter, gradient in zip(owners, gradients, strict=True):
        parameter.grad = gradient


def clip(
    state: TrainState,
    gradients: Sequence[torch.Tensor],
    finite: bool,
    norm: torch.Tensor | None = None,
    bad: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Clip gradients to `trainer.clip_norm` if they are finite, and return their norm before.

    Args:
        norm: of the whole gradient, if other ranks hold parts of it; `None`: of these gradients.
        bad: on the device, true if the gradients are not finite after all, and must stay as they are.

    Returns:
        `None` without `trainer.clip_norm`.
    """
    most = state.config.trainer.clip_norm
    if most is None:
        return None
    norm = torch.nn.utils.get_total_norm(with_values(gradients)) if norm is None else norm
    if finite:
        safe = norm if bad is None else norm.masked_fill(bad, 0.0)
        torch.nn.utils.clip_grads_with_norm_(state.parameters, most, safe)
    return norm


def update(state: TrainState, step: int, microbatches: list[Any], bad: torch.Tensor | None = None) -> None:
    """Let the optimizer change the weights.

    Args:
        bad: on the device, true if the update must change nothing after all.

    Raises:
        DeviceMemoryError: memory ran out.
    """
    why = "The optimizer's update cannot be done again: some weights may have moved."
    sizes = sizes_of(microbatches)
    with fatal_out_of_memory(state, step, sizes, why), skip_if_nonfinite(state.optimizer, bad):
        state.optimizer.step()


def advance_schedule(state: TrainState, finite: bool) -> None:
    """Set the learning rate of the next step; skipped steps count, too."""
    if finite:
        state.schedule.step()
    else:
        restart_schedule(state.schedule, state.schedule.last_epoch + 1)

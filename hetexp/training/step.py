"""One optimizer step of the global batch that all ranks take together, each on its part of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hetexp.data.loader import LocalBatch
from hetexp.optimizer.build import restart_schedule
from hetexp.training.gradient import take_gradient
from hetexp.training.measure import StepTimer
from hetexp.training.model_hooks import conclude, project, share
from hetexp.training.nonfinite.grad_check import GradCheck, may_be_skipped, skip_if_nonfinite
from hetexp.training.nonfinite.search import KeptBuffers
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import (
    ends_with_shortage,
    halve_together,
    sizes_of,
    split_microbatches,
)
from hetexp.training.state import TrainState


@dataclass
class StepResult:
    """Of one optimizer step, this rank's part."""

    loss_sum: torch.Tensor
    """Sum over the local elements, on the device: reading it would wait for the device."""
    global_count: float
    grad_norm: torch.Tensor | None
    """Before clipping, of the whole batch."""
    learning_rate: float
    """The one that this step used."""
    skipped: int = 0
    """Whether the gradient was not finite and the weights therefore stay as they were; of local steps, how
    many that all ranks know of since the step before. The same on every rank."""
    beyond_mending: bool = False
    """Whether, in addition, no smaller loss scale would help."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Of `loss_sum`, each microbatch's own, as the step was done at last."""
    factor: float = 1.0
    """What they were multiplied by before backward."""
    synchronised: bool = True
    """Whether all ranks hold the same weights after it, as after every joint step."""
    local_count: float = 0
    """Of `global_count`, this rank's own, where the ranks took the step together."""


def joint_step(
    parts: TrainState, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer
) -> StepResult:
    """Do one optimizer step of the global batch: the same gradient as one device on all of it.

    Where memory runs out on a rank, all of them do it again (`hetexp.training.recovery.oom_recovery`).
    """
    keeps = (parts.looks or parts.survives) and parts.has_buffers
    buffers = KeptBuffers(parts.model) if keeps else None
    grad_norm = None
    while True:
        microbatches = split_microbatches(batch.microbatches, parts.microbatch_limits[parts.rank])
        bookmark = meter.bookmark()
        num_passes = parts.num_passes(batch.counts)
        with nullcontext() if buffers is None else buffers.put_back_on_error():
            gradient = take_gradient(parts, step, microbatches, normalizer, meter, num_passes)
            normalizer.share_loss(gradient.loss_sum)
            shared = share(parts, step, gradient.tally, batch.global_samples)
        parts.backend.begin_update()
        project(parts)
        owners = [p for p in parts.parameters if p.grad is not None]
        gradients = [p.grad for p in owners if p.grad is not None]
        verdict = GradCheck(parts, gradients, normalizer.loss_scale, parts.looks)
        # Queued before this rank knows whether the gradient is finite, so that the device need not wait.
        ahead = verdict.bad is not None and gradient.shortage is None and may_be_skipped(parts)
        if ahead:
            grad_norm = clip(parts, gradients, True, bad=verdict.bad)
            update(parts, step, microbatches, verdict.bad)
            if not parts.config.trainer.check_sync_every:  # which compares gradients, too
                give(owners, [None] * len(owners))  # now, while the device is busy
        finite = verdict.finite() and gradient.shortage is None
        if finite:
            break
        if ahead:
            give(owners, gradients)
        if buffers is not None:
            buffers.put_back()
        if parts.guard is None:
            break
        if not halve_together(parts, step, microbatches, gradient.shortage):
            break
        meter.back_to(bookmark)
        gradients.clear()  # the memory is needed
    mendable = normalizer.loss_scale.update(finite) if normalizer.loss_scale is not None else finite
    if not ahead:
        # After the exchange and the weighting: every rank clips the gradient of the whole batch.
        grad_norm = clip(parts, gradients, finite)
    learning_rate = end_step(parts, step, microbatches, finite, updated=ahead)
    if finite:
        conclude(parts, shared)
    meter.samples += batch.local_samples
    return StepResult(
        loss_sum=gradient.loss_sum,
        global_count=gradient.global_count,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        skipped=not finite,
        beyond_mending=not mendable,
        losses=gradient.losses,
        factor=gradient.factor,
        local_count=normalizer.local_count,
    )


def give(owners: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Give parameters these gradients, or none."""
    for parameter, gradient in zip(owners, gradients, strict=True):
        parameter.grad = gradient


def clip(
    parts: TrainState,
    gradients: Sequence[torch.Tensor],
    finite: bool,
    norm: torch.Tensor | None = None,
    bad: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Clip gradients to `trainer.clip_norm` where they are finite, and return their norm before.

    Args:
        norm: where it is not that of these gradients alone.
        bad: on the device, whether they are not finite after all, and stay as they are.

    Returns:
        `None` where nothing is to be clipped.
    """
    most = parts.config.trainer.clip_norm
    if most is None:
        return None
    norm = torch.nn.utils.get_total_norm(gradients) if norm is None else norm
    if finite:
        known = norm if bad is None else norm.masked_fill(bad, 0.0)
        torch.nn.utils.clip_grads_with_norm_(parts.parameters, most, known)
    return norm


def update(parts: TrainState, step: int, microbatches: list[Any], bad: torch.Tensor | None = None) -> None:
    """Let the optimizer change the weights.

    Args:
        bad: on the device, whether nothing is to change after all.

    Raises:
        DeviceMemoryError: memory ran out.
    """
    why = "The optimizer's update cannot be done again: some weights may have moved."
    sizes = sizes_of(microbatches)
    with ends_with_shortage(parts, step, sizes, why), skip_if_nonfinite(parts.optimizer, bad):
        parts.optimizer.step()


def end_step(
    parts: TrainState, step: int, microbatches: list[Any], finite: bool, updated: bool = False
) -> float:
    """Update the weights where the gradient is finite, move the schedule on, and return the step's rate.

    Args:
        updated: whether the update is queued already.

    Raises:
        DeviceMemoryError: memory ran out.
    """
    learning_rate = float(parts.optimizer.param_groups[0]["lr"])
    if finite:
        if not updated:
            update(parts, step, microbatches)
        parts.schedule.step()
    else:  # the rate follows the number of the step, also of one that changes nothing
        restart_schedule(parts.schedule, parts.schedule.last_epoch + 1)
    return learning_rate

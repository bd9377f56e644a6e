"""One optimizer step in which each rank computes its layers' part, of all samples of its pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetexp.data.loader import LocalBatch
from hetexp.hardware.memory.out_of_memory import is_out_of_memory
from hetexp.training.loss import count_of
from hetexp.training.measure import StepTimer
from hetexp.training.nonfinite.loss_scale import settle
from hetexp.training.nonfinite.search import KeptBuffers
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import ends_with_shortage, sizes_of
from hetexp.training.state import TrainState
from hetexp.training.step import StepResult, clip, end_step


def staged_step(
    parts: TrainState, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer
) -> StepResult:
    """Do one optimizer step of the global batch: the same gradient as one device on all of it.

    The rank of a pipeline's last stage multiplies its loss by 1 / N, N being the global count, and all
    gradients are sums from there on: over microbatches, pipelines, and the two ends of a tied weight.
    Whatever is decided about the step is decided by all ranks together, which then step alike.
    """
    staging, microbatches = parts.staging, batch.microbatches
    assert staging is not None
    count = sum(count_of(parts.loss, targets) for _, targets in microbatches) if staging.is_last else 0
    normalizer.start(count)
    buffers = KeptBuffers(parts.model) if parts.looks else None
    parts.optimizer.zero_grad(set_to_none=True)
    why = "The other ranks of the pipeline cannot do the step again."
    with ends_with_shortage(parts, step, sizes_of(microbatches), why), _bare_shortage():
        parts.backend.begin_step(step)
        factor, global_count = normalizer.factor()
        loss_sum = staging.run(microbatches, factor)
        staging.gradients.sum()
    meter.add(staging.times.busy_seconds[-1], staging.times.step_seconds[-1])
    look = parts.config.trainer.non_finite != "continue"
    gradients = [p.grad for p in parts.model.parameters() if p.grad is not None]
    finite, norm = settle(gradients, normalizer.loss_scale, look), None
    clips = parts.config.trainer.clip_norm is not None
    if look or normalizer.loss_scale is not None or clips:
        finite, norm = staging.gradients.agree(finite, clips)
    if not finite and buffers is not None:
        buffers.put_back()
    parts.backend.begin_update()  # not before: to agree is to wait for the others
    mendable = normalizer.loss_scale.update(finite) if normalizer.loss_scale is not None else finite
    grad_norm = None
    if norm is not None:  # of all stages
        of_all = torch.tensor(norm, dtype=parts.dtype, device=parts.device)
        grad_norm = clip(parts, gradients, finite, of_all)
    learning_rate = end_step(parts, step, microbatches, finite)
    meter.samples += batch.local_samples
    return StepResult(
        loss_sum, global_count, grad_norm, learning_rate, not finite, not mendable, factor=factor
    )


@contextmanager
def _bare_shortage() -> Iterator[None]:
    """Raise what torch's schedule wraps into an error of its own, where memory ran out."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, RuntimeError) and is_out_of_memory(error.__cause__):
            raise error.__cause__ from None
        raise

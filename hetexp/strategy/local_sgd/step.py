"""A rank's own optimizer steps with its own samples; now and then the ranks meet (`LocalTraining.sync`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from hetexp.comm.communicator import SoloCommunicator
from hetexp.data.loader import LocalBatch, chop, cut
from hetexp.optimizer.build import restart_schedule
from hetexp.strategy.hierarchical_sgd.host_group import HostGroup
from hetexp.strategy.local_sgd.local import FIX, LocalTraining, explain
from hetexp.training.gradient import take_gradient
from hetexp.training.measure import StepTimer
from hetexp.training.model_hooks import conclude, project, share
from hetexp.training.nonfinite.loss_scale import NonFiniteError, settle
from hetexp.training.nonfinite.search import KeptBuffers, search
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import halve_alone, sizes_of, split_by_sizes
from hetexp.training.state import TrainState
from hetexp.training.step import StepResult, clip, update


def local_step(
    parts: TrainState, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer
) -> StepResult:
    """Take this rank's optimizer steps for a global batch, each with the mean over its own samples.

    Clipping, loss scale and microbatches are this rank's own matter until the next sync. The learning rate
    follows the global step, however many local ones a rank takes in it.

    Raises:
        NonFiniteError: see `LocalTraining.sync`; at once where the ranks never meet.
    """
    local = parts.local
    assert local is not None
    local.begin(parts)
    together = local.host.communicator if local.host is not None else SoloCommunicator()
    own = LossNormalizer(together, 1, loss_scale=normalizer.loss_scale)
    pieces = _pieces(parts, local, step, batch)
    if not pieces:
        parts.backend.begin_step(step)
    results = [_own_step(parts, step, *piece, own, meter) for piece in pieces]
    learning_rate = float(parts.optimizer.param_groups[0]["lr"])
    restart_schedule(parts.schedule, parts.schedule.last_epoch + 1)
    meter.samples += batch.local_samples
    local.samples += batch.local_samples
    for result in results:
        _take_in(parts, local, step, result)
    if parts.balancer.follows and step >= 0:
        local.since.seconds.append((step, batch.global_samples, meter.since_last()))
    due = local.due(parts, step)
    skipped = local.sync(parts, step, own.loss_scale, meter) if due else 0
    if local.settings is None:
        skipped = sum(result.skipped for result in results)
    zero = torch.zeros((), dtype=parts.dtype, device=parts.device)
    return StepResult(
        loss_sum=sum((result.loss_sum for result in results), zero),
        global_count=sum(result.global_count for result in results),
        grad_norm=results[-1].grad_norm if results else None,
        learning_rate=learning_rate,
        skipped=skipped,
        synchronised=due,
    )


def _pieces(
    parts: TrainState, local: LocalTraining, step: int, batch: LocalBatch
) -> list[tuple[list[Any], list[list[int]]]]:
    """Return the microbatches of each local step, consecutive pieces of this rank's slice.

    With them come the places of their samples in the training data.
    """
    number = local.pieces(parts, step, batch.global_samples, batch.local_samples)
    if number == 0:
        return []
    if not batch.local_samples:
        return [([], [[]])]
    passes = [parts.pass_sizes(size) for size in cut(batch.local_samples, number, None)]
    in_all = [size for sizes in passes for size in sizes]
    cut_up = split_by_sizes(batch.microbatches, in_all)
    places = list(chop([index for one in batch.indices for index in one], in_all))
    pieces, start = [], 0
    for sizes in passes:
        end = start + len(sizes)
        pieces.append((cut_up[start:end], places[start:end]))
        start = end
    return pieces


def _own_step(
    parts: TrainState,
    step: int,
    samples: list[Any],
    places: list[list[int]],
    normalizer: LossNormalizer,
    meter: StepTimer,
) -> StepResult:
    """Do one optimizer step with these microbatches, smaller ones where memory runs out.

    The ranks of a host that step together sum their gradients before, and do it again together.
    """
    host = parts.local.host if parts.local is not None else None
    look = parts.config.trainer.non_finite != "continue"
    buffers = KeptBuffers(parts.model) if parts.looks and parts.has_buffers else None
    suspects = list(zip(samples, places, strict=True)) if places[0] else []
    while True:
        bookmark = meter.bookmark()
        gradient = take_gradient(parts, step, samples, normalizer, meter)
        short = gradient.shortage is not None
        if not (host.any(short) if host is not None else short):
            break
        if buffers is not None:
            buffers.put_back()
        if gradient.shortage is not None:
            limit = halve_alone(parts, step, samples, gradient.shortage)
            samples = split_by_sizes(
                samples, [piece for n in sizes_of(samples) for piece in cut(n, 1, limit)]
            )
        meter.back_to(bookmark)
    if host is not None:
        _sum_over_host(parts, host, meter)
    parts.backend.begin_update()  # not before: to sum is to wait for the others
    gradients = [p.grad for p in parts.parameters if p.grad is not None]
    finite = settle(gradients, normalizer.loss_scale, look)
    mendable = normalizer.loss_scale.update(finite) if normalizer.loss_scale is not None else finite
    if not finite and buffers is not None:
        buffers.put_back()
    since = parts.local.since if parts.local is not None else None
    if look and not mendable and since is not None and not since.hopeless_step:
        of_loss = not math.isfinite(float(gradient.loss_sum))
        since.found = search(parts, suspects, gradient.factor, of_loss)
    project(parts)
    grad_norm = clip(parts, gradients, finite)
    if finite and gradient.global_count:
        update(parts, step, samples)
        num_samples = sum(sizes_of(samples))
        if since is not None and parts.local is not None and parts.local.settings is not None:
            since.counted(gradient.tally, num_samples)
            conclude(parts, None)
        else:
            conclude(parts, share(parts, step, gradient.tally, num_samples))
    rate = float(parts.optimizer.param_groups[0]["lr"])
    count = normalizer.local_count if host is not None else gradient.global_count
    return StepResult(gradient.loss_sum, count, grad_norm, rate, not finite, not finite and not mendable)


def _sum_over_host(parts: TrainState, host: HostGroup, meter: StepTimer) -> None:
    """Sum the gradients over the ranks of this host; the time is spent waiting for them."""
    start = parts.backend.mark()
    host.sum()
    meter.waited(start, parts.backend.mark())
    if parts.local is not None:
        parts.local.host_bytes += host.gradients.num_bytes


def _take_in(parts: TrainState, local: LocalTraining, step: int, result: StepResult) -> None:
    """Remember what a local step did until the next sync.

    Raises:
        NonFiniteError: the step was left out, nothing will mend that, and this rank never asks the others.
    """
    since = local.since
    if not result.skipped:
        since.count += result.global_count
        return
    since.left_out += 1
    if not result.beyond_mending or since.hopeless_step:
        return
    since.hopeless_step, since.hopeless_loss = step + 1, float(result.loss_sum)
    if local.settings is None and parts.config.trainer.non_finite == "stop":
        device = f"{parts.plan.devices[parts.rank]}"
        message = explain(step + 1, since.hopeless_loss, parts.rank, device, since.found)
        raise NonFiniteError(f"{message} {FIX}")

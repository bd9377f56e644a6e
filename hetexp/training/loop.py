"""The training loop. A step reads top to bottom in `train_step`."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.data.loader import LocalBatch, local_batches
from hetexp.training.evaluate import evaluate
from hetexp.training.measure import Meter, Totals
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.state import Parts, Progress

NO_SAMPLES = (None, None)
"""Stands for the only microbatch of a rank whose share is empty."""


@dataclass
class Outcome:
    """What a finished training hands to the summary; losses and evaluation are the same on every rank."""

    progress: Progress
    totals: Totals
    train_loss: float | None = None
    evaluation: dict[str, float] | None = None
    checkpoint: str | None = None
    stopped_early: bool = False


@dataclass
class StepResult:
    """Of one optimizer step, this rank's part."""

    loss_sum: torch.Tensor
    """Sum over the local elements, on the device: reading it would wait for the device."""
    global_count: int
    grad_norm: torch.Tensor | None
    """Before clipping, of the whole batch."""
    learning_rate: float
    """The one that this step used."""


def train_step(
    parts: Parts, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: Meter
) -> StepResult:
    """Do one optimizer step of the global batch: the same gradient as one device on all of it."""
    normalizer.start(sum(parts.loss.count(targets) for _, targets in batch.microbatches))
    parts.optimizer.zero_grad(set_to_none=True)
    microbatches: list[Any] = batch.microbatches or [NO_SAMPLES]
    loss_sum = torch.zeros((), dtype=parts.dtype, device=parts.device)
    factor, global_count = 0.0, 0
    parts.backend.begin_step(step)
    if parts.exchange is not None:
        parts.exchange.begin_step()
    for position, (inputs, targets) in enumerate(microbatches):
        last = position == len(microbatches) - 1
        with nullcontext() if last else parts.strategy.accumulate(parts.module):
            start = parts.backend.mark()
            output = parts.module(parts.to_device(inputs))
            total = output if inputs is None else parts.loss.total(output, parts.to_device(targets))
            meter.span(start, parts.backend.mark())
            if position == 0:
                factor, global_count = normalizer.factor()
            meter.backward(total * factor)
        loss_sum += total.detach()
    parts.backend.begin_update()
    grad_norm = None
    if parts.config.trainer.clip_norm is not None:
        # After the exchange and the weighting: every rank clips the gradient of the whole batch.
        grad_norm = torch.nn.utils.clip_grad_norm_(parts.model.parameters(), parts.config.trainer.clip_norm)
    learning_rate = float(parts.optimizer.param_groups[0]["lr"])
    parts.optimizer.step()
    parts.schedule.step()
    meter.samples += batch.local_samples
    return StepResult(loss_sum, global_count, grad_norm, learning_rate)


def train(parts: Parts, progress: Progress) -> Outcome:
    """Train from `progress` to the last step, evaluating, logging and saving on the way."""
    trainer = parts.config.trainer
    averaged_over = parts.strategy.averaged_over(parts.communicator.world_size)
    normalizer = LossNormalizer(parts.communicator, averaged_over, parts.config.debug.normalizer)
    window = Window(parts)
    outcome = Outcome(progress, window.totals)
    evaluated_at = saved_at = -1
    parts.model.train()
    batches = local_batches(
        parts.train_data,
        parts.sampler,
        progress.position,
        parts.total_steps - progress.step,
        parts.split,
        parts.rank,
        trainer.accumulate,
        trainer.microbatch_size,
        trainer.num_workers,
    )
    window.restart()
    for batch in batches:
        result = train_step(parts, progress.step, batch, normalizer, window.meter)
        progress.step += 1
        progress.samples += batch.global_samples
        progress.position = batch.position
        window.add(result, batch)
        if progress.step % trainer.log_every == 0:
            outcome.train_loss = window.log(progress)
        if trainer.eval_every and progress.step % trainer.eval_every == 0:
            window.pause()
            outcome.evaluation, evaluated_at = evaluate_and_log(parts, progress), progress.step
            outcome.stopped_early = should_stop(parts, progress, outcome.evaluation)
            window.restart()
        if trainer.checkpoint_every and progress.step % trainer.checkpoint_every == 0:
            window.pause()
            outcome.checkpoint, saved_at = save(parts, progress), progress.step
            window.restart()
        if outcome.stopped_early:
            break
    if window.num_steps:
        outcome.train_loss = window.log(progress)
    if evaluated_at != progress.step:
        outcome.evaluation = evaluate_and_log(parts, progress)
    if saved_at != progress.step and not trainer.fast_dev_run:
        outcome.checkpoint = save(parts, progress)
    parts.communicator.barrier()  # nobody leaves while rank 0 still writes
    return outcome


class Window:
    """What happened since the last log line, on this rank; `log` makes it one line of all ranks."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.meter = Meter(parts.backend)
        self.totals = Totals()
        self._loss_sum: torch.Tensor | float = 0.0
        self.num_steps = 0
        self._count = self._samples = 0
        self._seconds = self._resumed_at = 0.0
        self._last: StepResult | None = None

    def restart(self) -> None:
        """Let the clock run: steps follow."""
        self.parts.backend.resume()
        self._resumed_at = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock: what follows is not training."""
        self.parts.backend.pause()
        self.parts.backend.synchronize()
        now = time.perf_counter()
        self._seconds += now - self._resumed_at
        self._resumed_at = now

    def add(self, result: StepResult, batch: LocalBatch) -> None:
        """Take a step in."""
        self._loss_sum = self._loss_sum + result.loss_sum
        self._count += result.global_count
        self._samples += batch.global_samples
        self.num_steps += 1
        self._last = result

    def log(self, progress: Progress) -> float | None:
        """Exchange sums with the other ranks, write one line on rank 0 and start again.

        Returns:
            The mean loss over the window, `None` where nothing counted; the same on every rank.
        """
        self.pause()
        compute, waited, local_samples = self.meter.take()
        world = self.parts.communicator.world_size
        # One vector for all: the loss sum, then each rank's compute seconds and samples in its own places.
        sums = torch.zeros(1 + 2 * world, dtype=torch.float64)
        sums[0] = float(self._loss_sum)
        sums[1 + self.parts.rank] = compute
        sums[1 + world + self.parts.rank] = local_samples
        sums = self.parts.communicator.all_reduce(sums)
        loss = float(sums[0]) / self._count if self._count else None
        metrics = self._line(progress, loss, sums[1 : 1 + world].tolist(), sums[1 + world :].tolist())
        for logger in self.parts.loggers:
            logger.log(metrics, progress.step)
        totals = self.totals
        totals.train_seconds += self._seconds
        totals.compute_seconds += compute
        totals.wait_seconds += waited
        totals.local_samples += local_samples
        totals.global_samples += self._samples
        totals.steps += self.num_steps
        self._loss_sum, self._seconds, self._count, self._samples, self.num_steps = 0.0, 0.0, 0, 0, 0
        return loss

    def _line(
        self, progress: Progress, loss: float | None, compute: list[float], samples: list[float]
    ) -> dict[str, float | int | None]:
        assert self._last is not None
        line: dict[str, float | int | None] = {
            "train/loss": loss,
            "train/learning_rate": self._last.learning_rate,
            "train/epoch": progress.position.epoch,
            "train/samples": progress.samples,
            "samples_per_second": self._samples / self._seconds,
            "step_seconds": self._seconds / self.num_steps,
        }
        if self._last.grad_norm is not None:
            line["train/grad_norm"] = float(self._last.grad_norm)
        for device, seconds, count in zip(self.parts.plan.devices, compute, samples, strict=True):
            line[f"device/{device.id}/share"] = count / self._samples
            line[f"device/{device.id}/samples_per_second"] = count / seconds if count else None
        return line


def evaluate_and_log(parts: Parts, progress: Progress) -> dict[str, float]:
    """Evaluate on all ranks and log on rank 0."""
    result = evaluate(parts)
    for logger in parts.loggers:
        logger.log({f"eval/{name}": value for name, value in result.items()}, progress.step)
    return result


def should_stop(parts: Parts, progress: Progress, evaluation: dict[str, float]) -> bool:
    """Decide on early stopping from values that all ranks share, so that all decide the same."""
    early = parts.config.trainer.early_stopping
    if early.patience is None or early.metric not in evaluation:
        return False
    value = evaluation[early.metric] * (-1.0 if early.metric == "accuracy" else 1.0)
    if math.isnan(value):
        improved = False
    elif progress.best is None:
        improved = True
    else:
        improved = value < progress.best - early.min_delta
    if improved:
        progress.best, progress.bad_evaluations = value, 0
    else:
        progress.bad_evaluations += 1
    return progress.bad_evaluations >= early.patience


def save(parts: Parts, progress: Progress) -> str | None:
    """Write a checkpoint on rank 0, whose replica is as good as any; return its path there."""
    if parts.rank != 0:
        return None
    state = TrainingState(
        step=progress.step,
        position=progress.position.to_dict(),
        schedule={"step": parts.schedule.last_epoch},
        extra={
            "run_id": parts.plan.run_id,
            "progress": progress.to_dict(),
            "emulated": parts.plan.emulated,
            "devices": [str(device) for device in parts.plan.devices],
            "config": parts.plan.config,
        },
    )
    return str(save_checkpoint(parts.checkpoints, parts.model, parts.optimizer, state))

"""The base of engines whose ranks each take optimizer steps with their own samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.step_message import StepMessage
from hetexp.data.loader import LocalBatch, chop, cut
from hetexp.optimizer.build import restart_schedule
from hetexp.strategy.local_sgd.sync_stats import SyncStats
from hetexp.training.engine import StepResult
from hetexp.training.gradient import Gradient, take_gradient
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.nonfinite.search import search
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import halve_on_this_rank, sizes_of, split_by_sizes
from hetexp.training.replica import Replica
from hetexp.training.step import guarded_step

LocalStep = tuple[list[Any], list[list[int]]]
"""The microbatches of a local step, and the places of their samples in the training data."""


class OwnSteps(Replica):
    """Takes local steps: each rank has its own clipping, loss scale and microbatches.

    The learning rate follows the global steps, however many local steps a rank takes in one.
    """

    recovers_together = False

    def __init__(self) -> None:
        self.since = SyncStats()
        """Statistics since the last sync."""
        self.samples = 0
        """Samples that this rank has trained on in the whole run."""
        self.drawn: tuple[float, float] | None = None
        """What ranks compare of the last batch (`LocalBatch.drawn`)."""

    def loaded_in(self) -> tuple[int, int | None]:
        return 1, None  # the whole local batch, of which local steps take their parts

    # ------------------------------------------------------------ one global step

    def step(self, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer) -> StepResult:
        state = self.state
        self.begin()
        self.drawn = batch.drawn
        local = LossNormalizer(StepMessage(self.step_group), 1, loss_scale=normalizer.loss_scale)
        local_steps = self._local_steps(step, batch)
        if not local_steps:
            state.backend.begin_step(step)
        results = [self._local_step(step, *local_step, local, meter) for local_step in local_steps]
        learning_rate = float(state.optimizer.param_groups[0]["lr"])
        restart_schedule(state.schedule, state.schedule.last_epoch + 1)
        meter.samples += batch.local_samples
        self.samples += batch.local_samples
        for result in results:
            self._count(step, result)
        if state.balancer.follows and step >= 0:
            self.since.seconds.append((step, batch.global_samples, meter.since_last()))
        zero = torch.zeros((), dtype=state.dtype, device=state.device)
        count = sum(result.local_count for result in results)
        whole = StepResult(
            loss_sum=sum((result.loss_sum for result in results), zero),
            global_count=count,
            grad_norm=results[-1].grad_norm if results else None,
            learning_rate=learning_rate,
            skipped=sum(result.skipped for result in results),
            local_count=count,
            met=False,
        )
        self.conclude(step, whole, local, meter)
        return whole

    def begin(self) -> None:
        """Make sure that the ranks start from the same weights; called before every step."""

    @property
    def step_group(self) -> Communicator:
        """The ranks that take each local step together."""
        return SoloCommunicator()

    def num_steps(self, step: int, num_global: int, num_local: int) -> int:
        """Return the number of local steps that this rank takes in a global one."""
        return min(1, num_local)

    def conclude(self, step: int, result: StepResult, normalizer: LossNormalizer, meter: StepTimer) -> None:
        """End a global step, for instance by an exchange with the other ranks; `result` may be changed."""

    def after_update(self, step: int, gradient: Gradient, num_samples: int) -> None:
        """Call the model's hooks after an update."""

    # ------------------------------------------------------------ one local step

    def _local_steps(self, step: int, batch: LocalBatch) -> list[LocalStep]:
        """Return the microbatches of each local step: consecutive parts of this rank's samples."""
        number = self.num_steps(step, batch.global_samples, batch.local_samples)
        if number == 0:
            return []
        if not batch.local_samples:
            return [([], [[]])]
        passes = [self.state.pass_sizes(size) for size in cut(batch.local_samples, number, None)]
        sizes = [size for of_step in passes for size in of_step]
        microbatches = split_by_sizes(batch.microbatches, sizes)
        places = list(chop([index for indices in batch.indices for index in indices], sizes))
        local_steps, start = [], 0
        for of_step in passes:
            end = start + len(of_step)
            local_steps.append((microbatches[start:end], places[start:end]))
            start = end
        return local_steps

    def _local_step(
        self,
        step: int,
        samples: list[Any],
        places: list[list[int]],
        normalizer: LossNormalizer,
        meter: StepTimer,
    ) -> StepResult:
        state, stats = self.state, self.since
        suspects = list(zip(samples, places, strict=True)) if places[0] else []
        done = guarded_step(state, self, step, samples, normalizer, meter)
        gradient = done.gradient
        checked = state.config.trainer.non_finite != "continue"
        if checked and not done.recoverable and not stats.unrecoverable_step:
            of_loss = not math.isfinite(float(gradient.loss_sum))
            stats.samples_found = search(state, suspects, gradient.factor, of_loss)
        if done.finite and gradient.updates:
            self.after_update(step, gradient, sum(sizes_of(done.microbatches)))
        return done.result(local_count=normalizer.local_count)

    def gradient(
        self, step: int, microbatches: list[Any], normalizer: LossNormalizer, meter: StepTimer
    ) -> Gradient:
        gradient = take_gradient(self.state, step, microbatches, normalizer, meter)
        gradient.updates = bool(gradient.global_count)
        if gradient.shortage is not None:
            gradient.finite = False
        return gradient

    def smaller(self, step: int, microbatches: list[Any], gradient: Gradient) -> list[Any] | None:
        if gradient.shortage is None:
            return None
        limit = halve_on_this_rank(self.state, step, microbatches, gradient.shortage)
        return split_by_sizes(
            microbatches, [size for n in sizes_of(microbatches) for size in cut(n, 1, limit)]
        )

    def _count(self, step: int, result: StepResult) -> None:
        """Count a local step until the next sync."""
        stats = self.since
        if not result.skipped:
            stats.count += result.local_count
            return
        stats.skipped += 1
        if result.unrecoverable and not stats.unrecoverable_step:
            stats.unrecoverable_step, stats.unrecoverable_loss = step + 1, float(result.loss_sum)

    # ------------------------------------------------------------ what is logged and saved

    def device_metrics(self, losses: Sequence[float], counts: Sequence[float]) -> dict[str, float | None]:
        rows = zip(self.state.plan.devices, losses, counts, strict=True)
        return {
            f"device/{device.id}/train_loss": loss / count if count else None for device, loss, count in rows
        }

    def checkpoint_bytes(self, local_bytes: int) -> int:
        return local_bytes * self.state.plan.world_size

    def forget(self) -> None:
        self.since, self.samples = SyncStats(), 0

    def sent_bytes(self, steps: int) -> float | None:
        return 0.0 if steps else None

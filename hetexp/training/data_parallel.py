"""The engine of strategies whose ranks take one common step, each with its part of the samples."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hetexp.comm.compression import compressor_of
from hetexp.core.plan import Plan
from hetexp.data.loader import LocalBatch
from hetexp.training.engine import StepResult
from hetexp.training.gradient import Gradient, take_gradient
from hetexp.training.group import alone, connect, hook_exchange
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.model_hooks import conclude, share
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import halve_together, split_microbatches
from hetexp.training.replica import Replica
from hetexp.training.step import advance_schedule, guarded_step


class DataParallel(Replica):
    """Takes the step that a single device would take with the global batch.

    Every rank computes its samples' part of the gradient, and the strategy's wrapper sums the parts during
    backward.
    """

    shares_gradients = True
    _batch: LocalBatch

    def connect(self, plan: Plan, store: dist.Store, again: bool) -> None:
        separate = plan.paced or self.state.config.comm.wire != "float32"
        connect(self.state, plan, store, separate, again)

    def attach_exchange(self, store: dist.Store) -> None:
        super().attach_exchange(store)
        hook_exchange(self.state)

    def step(self, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer) -> StepResult:
        parts, self._batch = self.state, batch
        done = guarded_step(parts, self, step, self._microbatches(), normalizer, meter)
        advance_schedule(parts, done.finite)
        if done.finite:
            conclude(parts, done.gradient.shared)
        meter.samples += batch.local_samples
        return done.result(local_count=normalizer.local_count)

    def gradient(
        self, step: int, microbatches: list[Any], normalizer: LossNormalizer, meter: StepTimer
    ) -> Gradient:
        parts, batch = self.state, self._batch
        passes = parts.num_passes(batch.counts)
        gradient = take_gradient(parts, step, microbatches, normalizer, meter, passes)
        normalizer.message.share_loss(gradient.loss_sum)
        gradient.shared = share(parts, step, gradient.tally, batch.global_samples)
        return gradient

    def smaller(self, step: int, microbatches: list[Any], gradient: Gradient) -> list[Any] | None:
        parts = self.state
        if parts.guard is None or not halve_together(parts, step, microbatches, gradient.shortage):
            return None
        return self._microbatches()

    def _microbatches(self) -> list[Any]:
        limit = self.state.microbatch_limits[self.state.rank]
        return split_microbatches(self._batch.microbatches, limit)

    def sent_bytes(self, steps: int) -> float | None:
        parts = self.state
        if not parts.config.debug.exchange:
            return 0
        if parts.hook is not None:
            return parts.hook.sent_bytes / steps if steps else None
        codec = compressor_of(parts.config.comm.wire)
        if parts.paced is not None and codec is not None:
            size = parts.dtype.itemsize
            return sum(codec.sent_bytes(num_bytes // size) for _, num_bytes in parts.paced.buckets)
        return parts.strategy.exchanged_bytes(parts.model, parts.communicator.world_size)


class Alone(DataParallel):
    """Trains in one rank, which forms no group."""

    def connect(self, plan: Plan, store: dist.Store, again: bool) -> None:
        alone(self.state, plan)

"""The engine of data parallel strategies: all ranks take one step, each with its part of the samples."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hetexp.comm.communicator import SoloCommunicator
from hetexp.comm.forms import of_other_forms
from hetexp.core.plan import Plan
from hetexp.data.loader import LocalBatch
from hetexp.training.engine import StepResult
from hetexp.training.gradient import Gradient, take_gradient
from hetexp.training.group import connect
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.model_hooks import conclude, share
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import halve_on_all_ranks, split_microbatches
from hetexp.training.replica import Replica
from hetexp.training.replicas import warn_of_own_buffers
from hetexp.training.step import advance_schedule, guarded_step


class DataParallel(Replica):
    """Takes the step that a single device would take with the global batch.

    Every rank computes the gradient of its samples, and the strategy's wrapper sums these during backward.
    """

    shares_gradients = exchanges_in_backward = True
    _batch: LocalBatch
    _buffers_unseen = True
    """Whether no step of this group has compared the ranks' buffers."""

    def connect(self, plan: Plan, store: dist.Store, again: bool) -> None:
        state, self._buffers_unseen = self.state, True
        separate = plan.paced or state.config.comm.wire != "float32" or of_other_forms(state.model)
        connect(state, plan, store, separate, again)

    def step(self, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer) -> StepResult:
        state, self._batch = self.state, batch
        done = guarded_step(state, self, step, self._microbatches(), normalizer, meter)
        advance_schedule(state, done.finite)
        if done.finite:
            conclude(state, done.gradient.shared)
        meter.samples += batch.local_samples
        return done.result(local_count=normalizer.local_count)

    def gradient(
        self, step: int, microbatches: list[Any], normalizer: LossNormalizer, meter: StepTimer
    ) -> Gradient:
        state, batch = self.state, self._batch
        num_passes = state.num_passes(batch.counts)
        gradient = take_gradient(state, step, microbatches, normalizer, meter, num_passes)
        normalizer.message.share_loss(gradient.loss_sum)
        if self._buffers_unseen and step >= 0:
            self._buffers_unseen = False
            warn_of_own_buffers(state)
        gradient.shared = share(state, step, gradient.tally, batch.global_samples)
        return gradient

    def smaller(self, step: int, microbatches: list[Any], gradient: Gradient) -> list[Any] | None:
        state = self.state
        if state.guard is None or not halve_on_all_ranks(state, step, microbatches, gradient.shortage):
            return None
        return self._microbatches()

    def _microbatches(self) -> list[Any]:
        limit = self.state.microbatch_limits[self.state.rank]
        return split_microbatches(self._batch.microbatches, limit)

    def sent_bytes(self, steps: int) -> float | None:
        state = self.state
        if not state.config.debug.exchange:
            return 0
        if state.hook.sent_bytes:  # a strategy need not use it
            return state.hook.sent_bytes / steps if steps else None
        return state.strategy.exchanged_bytes(state.model, state.communicator.world_size)


class Alone(DataParallel):
    """Trains in one rank, which forms no group."""

    def connect(self, plan: Plan, store: dist.Store, again: bool) -> None:
        state = self.state
        state.plan, state.communicator, state.exchange = plan, SoloCommunicator(), None

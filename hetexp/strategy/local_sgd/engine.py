"""The engine of local SGD: steps of each rank alone, and now and then a sync of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm.summation import Summation
from hetexp.core.cost.step import Links
from hetexp.hardware.links import links_of
from hetexp.model.hooks import NO_HOOKS
from hetexp.strategy.local_sgd.checkpoint import rank_files, restore_rank
from hetexp.strategy.local_sgd.outer import OuterStep, flat, put
from hetexp.strategy.local_sgd.own_steps import OwnSteps
from hetexp.strategy.local_sgd.rounds import mean_of_rounds, rounds_of
from hetexp.strategy.local_sgd.settings import LocalSettings
from hetexp.strategy.local_sgd.sync_stats import FIX, SyncStats, explain
from hetexp.strategy.pipeline.shared_gradients import SharedGradients
from hetexp.training.engine import PacedLink, StepResult
from hetexp.training.gradient import Gradient
from hetexp.training.measuring.timer import StepTimer, Totals
from hetexp.training.model_hooks import conclude, no_tally, share
from hetexp.training.nonfinite.loss_scale import LossScale, NonFiniteError
from hetexp.training.nonfinite.samples import WIDTH, NonFiniteSamples
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.streams import check_drawn

log = logging.getLogger(__name__)

WARMUP_SYNCS = 3


class LocalSteps(OwnSteps):
    """One rank's side of `local_sgd`."""

    outer: OuterStep | None = None
    """Set from the first step on."""
    _warned = False
    _round_bytes = 0
    """Bytes that this rank has sent between syncs."""

    def __init__(self, settings: LocalSettings) -> None:
        super().__init__()
        self.settings = settings

    def attach_exchange(self, store: dist.Store) -> None:
        super().attach_exchange(store)
        state = self.state
        self._summation = Summation(state.exchange, self.settings.wire, state.hook, state.device)
        rounds = rounds_of(self.settings, state.plan.world_size)
        alone = (state.rank,)
        self._rounds = [next((group for group in groups if state.rank in group), alone) for groups in rounds]
        groups = sorted({group for group in self._rounds if len(group) > 1})
        self._neighbours = SharedGradients(
            state, [(group, []) for group in groups], [], dist.PrefixStore("rounds", store)
        )

    # ------------------------------------------------------------ steps

    def begin(self) -> None:
        self.synced()

    def synced(self) -> OuterStep:
        """Return the outer step; at the first call all ranks get the weights of rank 0."""
        if self.outer is None:
            state = self.state
            self.outer = OuterStep(state.model, self.settings, state.communicator, self._summation)
            self.outer.begin_together()
            self.outer.hold()
        return self.outer

    def num_steps(self, step: int, num_global: int, num_local: int) -> int:
        if self.settings.local_steps == "equal" or not num_local:
            return min(1, num_local)
        counts = self.state.balancer.split(max(step, 0), num_global).counts
        smallest = min(count for count in counts if count)
        return max(1, round(num_local / (self.settings.local_batch_size or smallest)))

    def after_update(self, step: int, gradient: Gradient, num_samples: int) -> None:
        self.since.counted(gradient.tally, num_samples)
        conclude(self.state, None)

    def conclude(self, step: int, result: StepResult, normalizer: LossNormalizer, meter: StepTimer) -> None:
        """Sync if it is due; only a sync reports to all ranks how many steps were skipped.

        Raises:
            NonFiniteError: see `sync`.
        """
        due = self._due(step)
        result.skipped = self.sync(step, normalizer.loss_scale, meter) if due else 0
        if not due and step >= 0 and self._rounds:
            self._average(self._rounds[step % len(self._rounds)], meter)
        result.synchronised = result.can_save = due

    def _due(self, step: int) -> bool:
        """Return whether a sync follows this step (the number of steps done before it)."""
        if step < 0:
            return False
        return (step + 1) % self.settings.sync_every == 0 or step + 1 == self.state.total_steps

    def _average(self, ranks: tuple[int, ...], meter: StepTimer) -> None:
        """Replace this rank's weights by the mean over a few ranks."""
        if len(ranks) < 2:
            return
        start = self.state.backend.mark()
        trained = [p for p in self.state.model.parameters() if p.requires_grad]
        weights = flat(trained)
        self._neighbours.sum_over(ranks, weights)
        self._round_bytes += self._neighbours.num_bytes
        put(weights / len(ranks), trained)
        meter.waited(start, self.state.backend.mark())

    # ------------------------------------------------------------ syncs

    def sync(self, step: int, loss_scale: LossScale | None, meter: StepTimer) -> int:
        """Average the changes of the ranks' weights since the last sync; all ranks call it.

        Returns:
            Number of local steps skipped since then, on all ranks together.

        Raises:
            NonFiniteError: on every rank, if one had a gradient that is not finite and `trainer.non_finite`
                says stop; nothing was averaged.
            PeerLostError: another rank is gone.
        """
        state, outer, stats = self.state, self.synced(), self.since
        if self.drawn is not None:  # before anything else: a rank whose stream has ended syncs too early
            check_drawn(state, self.drawn)
        state.backend.pause()
        start = state.backend.mark()
        rows = self._all_reduce_stats(loss_scale)
        self.since = SyncStats()
        self._agree(rows, loss_scale)
        self._check_finite(rows)
        total = float(rows[:, 0].sum())
        if total:
            weight = stats.count / total
            outer.step(weight)
            if self.settings.inner_state == "average":
                outer.average_moments(state.optimizer, weight)
            elif self.settings.inner_state == "reset":
                state.optimizer.state.clear()
            self._conclude_model(outer, step, stats)
        meter.waited(start, state.backend.mark())
        state.backend.resume()
        self._rebalance(step, stats, rows[:, _FIXED:])
        return int(rows[:, 1].sum())

    def _all_reduce_stats(self, loss_scale: LossScale | None) -> torch.Tensor:
        """Return every rank's report of its steps since the last sync, [ranks, `_FIXED` + steps]."""
        state, stats = self.state, self.since
        limit = state.microbatch_limits[state.rank]
        rows = torch.zeros((state.communicator.world_size, _FIXED + len(stats.seconds)), dtype=torch.float64)
        scale = (loss_scale.value, loss_scale.good_steps) if loss_scale is not None else (0.0, 0)
        row = [
            stats.count,
            stats.skipped,
            stats.unrecoverable_step,
            stats.unrecoverable_loss,
            *scale,
            limit or 0,
        ]
        seconds = [seconds for _, _, seconds in stats.seconds]
        rows[state.rank] = torch.tensor([*row, *stats.samples_found.to_row(), *seconds], dtype=torch.float64)
        return state.communicator.all_reduce(rows)

    def _agree(self, rows: torch.Tensor, loss_scale: LossScale | None) -> None:
        """Set the microbatch limits and the smallest loss scale of all ranks' reports."""
        self.state.microbatch_limits = [int(limit) or None for limit in rows[:, 6].tolist()]
        if loss_scale is not None:
            loss_scale.value = float(rows[:, 4].min())
            smallest = rows[:, 4] == rows[:, 4].min()
            loss_scale.good_steps = int(rows[smallest, 5].min())

    def _check_finite(self, rows: torch.Tensor) -> None:
        """Stop the run, or warn once, if a rank reports a gradient that is not finite."""
        state = self.state
        unrecoverable = [(rank, row) for rank, row in enumerate(rows.tolist()) if row[2]]
        if not unrecoverable or state.config.trainer.non_finite == "continue":
            return
        sentences = " ".join(
            explain(
                int(row[2]),
                row[3],
                rank,
                f"{state.plan.devices[rank]}",
                NonFiniteSamples.from_row(row[7:_FIXED]),
            )
            for rank, row in unrecoverable
        )
        if state.config.trainer.non_finite == "stop":
            state.communicator.barrier()
            raise NonFiniteError(f"{sentences} No weights were averaged after it. {FIX}")
        if state.rank == 0 and not self._warned:
            log.warning("%s Such steps are left out on that device; later ones are counted only.", sentences)
        self._warned = True

    def _conclude_model(self, outer: OuterStep, step: int, stats: SyncStats) -> None:
        """Call the model's hooks after an average; all ranks then hold the same weights."""
        state = self.state
        if state.hooks is NO_HOOKS:  # no collective for nothing
            return
        before = max(step, 0) // self.settings.sync_every * self.settings.sync_every
        conclude(state, None)  # so that candidates are scored with the final weights
        tally = stats.tally if stats.tally is not None else no_tally(state)
        samples = int(state.communicator.all_reduce(torch.tensor([stats.samples])))
        conclude(state, share(state, step, tally, samples, before))
        outer.hold()

    def _rebalance(self, step: int, stats: SyncStats, seconds: torch.Tensor) -> None:
        """Give the steps since the last sync to the balancer until it decides on another split."""
        state = self.state
        for position, (number, samples, _) in enumerate(stats.seconds):
            decision = state.balancer.observe(number, samples, seconds[:, position].tolist(), step)
            if state.rank == 0:
                state.balancer.record(decision)
            if decision is not None and decision.action in ("resplit", "move", "probe"):
                return

    # ------------------------------------------------------------ checkpoints

    def state_files(self) -> dict[str, bytes]:
        return rank_files(self.state, self.outer, self.settings) if self.outer is not None else {}

    def restore(self, folder: Path, extra: Mapping[str, Any]) -> None:
        restore_rank(self.state, self.synced, self.settings, folder)

    def forget(self) -> None:
        super().forget()
        self.outer = None
        self._summation.feedback, self._summation.sent_bytes = None, 0

    # ------------------------------------------------------------ emulation and summary

    @property
    def paced_links(self) -> Sequence[PacedLink]:
        return [*super().paced_links, self._neighbours]

    def rehearse_exchange(self) -> None:
        for _ in range(WARMUP_SYNCS):
            self.synced().step(1.0 / self.state.communicator.world_size)

    def extra_step_seconds(self) -> float:
        """Return a step's part of the averages on emulated links: to the host, the exchange, and back."""
        links = self.state.hook.links
        if links is None:
            return 0.0
        plan, trained = self.state.plan, [p for p in self.state.model.parameters() if p.requires_grad]
        length, size = sum(p.numel() for p in trained), trained[0].element_size()
        sync = _travel(links, length * size) + self._summation.seconds(links, length, size)
        rounds = [
            [
                _travel(few, length * size) + few.exchange_seconds(length * size)
                for few in (links_of(plan, [plan.devices[rank] for rank in group]) for group in groups)
            ]
            for groups in rounds_of(self.settings, plan.world_size)
        ]
        every = self.settings.sync_every
        return (sync + (every - 1) * mean_of_rounds(rounds)) / every

    def sent_bytes(self, steps: int) -> float | None:
        sent = self.outer.sent_bytes if self.outer is not None else 0
        return (sent + self._round_bytes) / steps if steps else None

    def summarise(self, summary: dict[str, Any], totals: Totals, ranks: Any) -> None:
        super().summarise(summary, totals, ranks)
        if self.settings.wire != "float32":
            summary["comm"]["wire_dtype"] = self.settings.wire


def _travel(links: Links, num_bytes: int) -> float:
    """Return what the slowest rank's bytes take to the host and back."""
    return 2 * max(links.to_host_seconds(rank, num_bytes) for rank in range(links.world_size))


_FIXED = 7 + WIDTH
"""Numbers of a rank's report at a sync: count, skipped steps, first unrecoverable step and its loss, loss
scale and steps since it changed, microbatch limit, that step's samples; seconds of each step follow."""

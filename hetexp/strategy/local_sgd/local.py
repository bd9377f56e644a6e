"""What a rank keeps while it takes steps by itself, and what all of them do together at a sync."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hetexp.comm.summation import Summation
from hetexp.core.cost.step import Links
from hetexp.hardware.links import links_of
from hetexp.strategy.hierarchical_sgd.host_group import HostGroup
from hetexp.strategy.independent import Independent
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.local_sgd.outer import OuterStep
from hetexp.training.measure import StepTimer
from hetexp.training.model_hooks import conclude, no_tally, share
from hetexp.training.nonfinite.loss_scale import LossScale, NonFiniteError
from hetexp.training.nonfinite.samples import ALONE, TOGETHER, WIDTH, NonFiniteSamples

if TYPE_CHECKING:
    from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

REHEARSED_SYNCS = 3
FIX = "Lower `optimizer.lr` or set `trainer.clip_norm`; trainer.non_finite=skip leaves such steps out."


@dataclass
class SyncStats:
    """What a rank did since the last sync."""

    count: float = 0
    """Samples or unmasked tokens that it trained on."""
    left_out: int = 0
    """Local steps whose gradient was not finite."""
    hopeless_step: int = 0
    """Number of the first step, from 1, of which no smaller loss scale would have helped; 0: none."""
    hopeless_loss: float = 0.0
    found: NonFiniteSamples = field(default_factory=NonFiniteSamples)
    """Which samples made that step so."""
    samples: int = 0
    """In local steps that were not left out."""
    tally: torch.Tensor | None = None
    """What the model has counted of them."""
    seconds: list[tuple[int, int, float]] = field(default_factory=list)
    """Step, samples of its global batch and own seconds, where shares follow the devices' speeds."""

    def counted(self, tally: torch.Tensor | None, num_samples: int) -> None:
        """Take in what the model has counted in a local step."""
        self.samples += num_samples
        if tally is not None:
            self.tally = tally if self.tally is None else self.tally + tally


class LocalTraining:
    """One rank's part of `local_sgd` or `independent` beside model and optimizer.

    Args:
        parts: of this rank, wired but for this.
        links: channels of emulated devices.
    """

    def __init__(self, parts: TrainState, links: Links | None = None) -> None:
        strategy = parts.strategy
        assert isinstance(strategy, (LocalSGD, Independent))
        self.settings = strategy if isinstance(strategy, LocalSGD) else None
        wire = self.settings.wire if self.settings is not None else "float32"
        self._links = links
        self._summation = Summation(parts.exchange, wire, parts.paced, links, parts.device)
        self.outer: OuterStep | None = None
        """From the first step on."""
        self.since = SyncStats()
        self.samples = 0
        """That this rank has trained on in the whole run."""
        self.goes_on = False
        """Whether the weights are a checkpoint's, which may be this rank's own."""
        self.evaluations: list[dict[str, float]] = []
        """Of each rank's own model, the last time that they were evaluated."""
        self.merged: dict[str, Any] | None = None
        """What became of the ranks' models (`hetexp.strategy.independent.merging`)."""
        self.host: HostGroup | None = None
        """Where the ranks of a host take each step together."""
        self.host_bytes = 0
        """That this rank has handed over to its host's others."""
        self._warned = False

    def begin(self, parts: TrainState) -> OuterStep:
        """Start from weights that all ranks hold; comes before the first step."""
        if self.outer is None:
            settings = self.settings or LocalSGD()
            self.outer = OuterStep(parts.model, settings, parts.communicator, self._summation)
            if not (self.goes_on and parts.strategy.apart):
                self.outer.begin_together()
                self.outer.hold()
        return self.outer

    def forget(self) -> None:
        """Start again: weights and optimizer were put back to where they had been before."""
        self.outer, self.since, self.samples, self.host_bytes = None, SyncStats(), 0, 0
        self._summation.feedback, self._summation.sent_bytes = None, 0

    @property
    def sent_bytes(self) -> int:
        return self.host_bytes + (self.outer.sent_bytes if self.outer is not None else 0)

    def pieces(self, parts: TrainState, step: int, num_global: int, num_local: int) -> int:
        """Return the number of local steps that this rank takes in a global one."""
        if self.host is not None:  # the others of its host wait for a rank without samples, too
            return 1
        if self.settings is None or self.settings.local_steps == "equal" or not num_local:
            return min(1, num_local)
        counts = parts.balancer.split(max(step, 0), num_global).counts
        smallest = min(count for count in counts if count)
        return max(1, round(num_local / (self.settings.local_batch_size or smallest)))

    def due(self, parts: TrainState, step: int) -> bool:
        """Return whether the ranks meet after this step (the number of steps done before it)."""
        if self.settings is None or step < 0:
            return False
        return (step + 1) % self.settings.sync_every == 0 or step + 1 == parts.total_steps

    def sync(self, parts: TrainState, step: int, loss_scale: LossScale | None, meter: StepTimer) -> int:
        """Average what the ranks trained since the last sync; all of them call it.

        Returns:
            How many local steps were left out since then, on all ranks together.

        Raises:
            NonFiniteError: on every rank, where one had a gradient that is not finite and
                `trainer.non_finite` says stop; nothing was averaged.
            PeerLostError: another rank is gone.
        """
        outer, mine = self.begin(parts), self.since
        parts.backend.pause()
        start = parts.backend.mark()
        rows = self._gathered(parts, loss_scale)
        self.since = SyncStats()
        _agree(parts, rows, loss_scale)
        self._face_non_finite(parts, rows)
        total = float(rows[:, 0].sum())
        if total:
            outer.step(mine.count / total)
            self._settle_moments(parts, outer, mine.count / total)
            self._conclude(parts, outer, step, mine)
        meter.waited(start, parts.backend.mark())
        parts.backend.resume()
        self._rebalance(parts, step, mine, rows[:, _FIXED:])
        return int(rows[:, 1].sum())

    def _gathered(self, parts: TrainState, loss_scale: LossScale | None) -> torch.Tensor:
        """Return what each rank tells of its steps since the last sync [ranks, `_FIXED` + steps]."""
        mine, limit = self.since, parts.microbatch_limits[parts.rank]
        rows = torch.zeros((parts.communicator.world_size, _FIXED + len(mine.seconds)), dtype=torch.float64)
        scale = (loss_scale.value, loss_scale.good_steps) if loss_scale is not None else (0.0, 0)
        row = [mine.count, mine.left_out, mine.hopeless_step, mine.hopeless_loss, *scale, limit or 0]
        seconds = [own for _, _, own in mine.seconds]
        rows[parts.rank] = torch.tensor([*row, *mine.found.to_row(), *seconds], dtype=torch.float64)
        return parts.communicator.all_reduce(rows)

    def _face_non_finite(self, parts: TrainState, rows: torch.Tensor) -> None:
        hopeless = [(rank, row) for rank, row in enumerate(rows.tolist()) if row[2]]
        if not hopeless or parts.config.trainer.non_finite == "continue":
            return
        sentences = " ".join(
            explain(
                int(row[2]),
                row[3],
                rank,
                f"{parts.plan.devices[rank]}",
                NonFiniteSamples.from_row(row[7:_FIXED]),
            )
            for rank, row in hopeless
        )
        if parts.config.trainer.non_finite == "stop":
            parts.communicator.barrier()
            raise NonFiniteError(f"{sentences} No weights were averaged after it. {FIX}")
        if parts.rank == 0 and not self._warned:
            log.warning("%s Such steps are left out on that device; later ones are counted only.", sentences)
        self._warned = True

    def _settle_moments(self, parts: TrainState, outer: OuterStep, weight: float) -> None:
        assert self.settings is not None
        if self.settings.inner_state == "average":
            outer.average_moments(parts.optimizer, weight)
        elif self.settings.inner_state == "reset":
            parts.optimizer.state.clear()

    def _conclude(self, parts: TrainState, outer: OuterStep, step: int, mine: SyncStats) -> None:
        """Let the model do what it does after a merge; where that leads is what all ranks hold."""
        if parts.hooks is None:
            return
        assert self.settings is not None
        before = max(step, 0) // self.settings.sync_every * self.settings.sync_every
        conclude(parts, None)  # candidates are judged by the merged weights as they will be
        tally = mine.tally if mine.tally is not None else no_tally(parts)
        samples = int(parts.communicator.all_reduce(torch.tensor([mine.samples])))
        conclude(parts, share(parts, step, tally, samples, before))
        outer.hold()

    def _rebalance(self, parts: TrainState, step: int, mine: SyncStats, seconds: torch.Tensor) -> None:
        """Judge the steps since the last sync one by one, until one of them asks for another split."""
        for position, (number, samples, _) in enumerate(mine.seconds):
            decision = parts.balancer.observe(number, samples, seconds[:, position].tolist(), step)
            if parts.rank == 0:
                parts.balancer.tell(decision)
            if decision is not None and decision.action in ("resplit", "move", "probe"):
                return

    def rehearse(self, parts: TrainState) -> None:
        """Exchange as a sync does, to find out how long that takes on this machine."""
        if self.settings is not None:
            for _ in range(REHEARSED_SYNCS):
                self.begin(parts).step(1.0 / parts.communicator.world_size)

    def sync_seconds(self, parts: TrainState) -> float:
        """Return the modelled time of a sync on emulated links: to the host, the exchange, and back."""
        if self.settings is None or self._links is None:
            return 0.0
        trained = [p for p in parts.model.parameters() if p.requires_grad]
        length, size = sum(p.numel() for p in trained), trained[0].element_size()
        travel = max(self._links.to_host_seconds(r, length * size) for r in range(self._links.world_size))
        return 2 * travel + self._summation.seconds(self._links, length, size)

    def host_seconds(self, parts: TrainState) -> float:
        """Return the modelled time of a step's sum over this rank's host on emulated links; nothing hides."""
        if self.host is None or self._links is None or len(self.host.ranks) < 2:
            return 0.0
        links = links_of(parts.plan, [parts.plan.devices[rank] for rank in self.host.ranks])
        num_bytes = sum(p.numel() * p.element_size() for p in parts.model.parameters() if p.requires_grad)
        travel = max(links.to_host_seconds(rank, num_bytes) for rank in range(links.world_size))
        return 2 * travel + links.exchange_seconds(num_bytes)


_FIXED = 7 + WIDTH
"""Numbers that every rank tells at a sync: count, steps left out, first hopeless step and its loss, loss
scale and steps since it changed, microbatch limit, the hopeless step's samples; its seconds follow."""


def _agree(parts: TrainState, rows: torch.Tensor, loss_scale: LossScale | None) -> None:
    """Take from all ranks' reports their microbatch limits, and the smallest loss scale."""
    parts.microbatch_limits = [int(limit) or None for limit in rows[:, 6].tolist()]
    if loss_scale is not None:
        loss_scale.value = float(rows[:, 4].min())
        smallest = rows[:, 4] == rows[:, 4].min()
        loss_scale.good_steps = int(rows[smallest, 5].min())


def explain(step: int, loss: float, rank: int, device: str, found: NonFiniteSamples) -> str:
    """Return the message about a local step whose gradient is not finite.

    Args:
        step: its number, counted from 1.
        found: the samples that made it so.
    """
    which = f"the loss is {loss} there" if not math.isfinite(loss) else "the loss is finite"
    why = {ALONE: f", because of {found.words()}", TOGETHER: f", in a pass over {found.words()}"}
    because = why.get(found.what, "")
    return f"The gradient of step {step} on rank {rank}, {device}, is not finite, and {which}{because}."

"""The engine of hierarchical local SGD: the ranks of a host take each local step together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hetexp.comm.communicator import Communicator
from hetexp.core.device import DeviceSpec
from hetexp.hardware.links import links_of
from hetexp.strategy.hierarchical_sgd.host_group import HostGroup
from hetexp.strategy.local_sgd.engine import LocalSteps
from hetexp.strategy.local_sgd.settings import LocalSettings
from hetexp.training.engine import PacedLink
from hetexp.training.gradient import Gradient
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.normalizer import LossNormalizer

GroupsOf = Callable[[Sequence[DeviceSpec]], list[list[int]]]


class HierarchicalSteps(LocalSteps):
    """One rank's side of `hierarchical_sgd`.

    Args:
        groups_of: returns the ranks of each host.
    """

    host_bytes = 0
    """Bytes that this rank has sent to the other ranks of its host."""

    def __init__(self, settings: LocalSettings, groups_of: GroupsOf) -> None:
        super().__init__(settings)
        self._groups_of = groups_of

    def attach_exchange(self, store: dist.Store) -> None:
        super().attach_exchange(store)
        state = self.state
        (ranks,) = (group for group in self._groups_of(state.plan.devices) if state.rank in group)
        self.host = HostGroup(state, ranks, store)

    @property
    def step_group(self) -> Communicator:
        return self.host.communicator

    def num_steps(self, step: int, num_global: int, num_local: int) -> int:
        return 1  # also for a rank without samples, for which the others of its host wait

    def gradient(
        self, step: int, microbatches: list[Any], normalizer: LossNormalizer, meter: StepTimer
    ) -> Gradient:
        """Compute this rank's gradient and sum it over the host; retry on all if memory ran out on one."""
        gradient = super().gradient(step, microbatches, normalizer, meter)
        self._retries = self.host.any(gradient.shortage is not None)
        if self._retries:
            gradient.finite = False
            return gradient
        start = self.state.backend.mark()
        self.host.sum()
        meter.waited(start, self.state.backend.mark())
        self.host_bytes += self.host.gradients.num_bytes
        return gradient

    def smaller(self, step: int, microbatches: list[Any], gradient: Gradient) -> list[Any] | None:
        if not self._retries:
            return None
        return super().smaller(step, microbatches, gradient) or microbatches

    def forget(self) -> None:
        super().forget()
        self.host_bytes = 0

    @property
    def paced_links(self) -> Sequence[PacedLink]:
        return [*super().paced_links, self.host.gradients]

    def extra_step_seconds(self) -> float:
        """Return the seconds of a step's part of a sync, and of the sum over this rank's host."""
        state, seconds = self.state, super().extra_step_seconds()
        if not state.plan.paced or len(self.host.ranks) < 2:
            return seconds
        links = links_of(state.plan, [state.plan.devices[rank] for rank in self.host.ranks])
        num_bytes = sum(p.numel() * p.element_size() for p in state.model.parameters() if p.requires_grad)
        travel = max(links.to_host_seconds(rank, num_bytes) for rank in range(links.world_size))
        return seconds + 2 * travel + links.exchange_seconds(num_bytes)

    def sent_bytes(self, steps: int) -> float | None:
        between = super().sent_bytes(steps)
        return None if between is None else between + self.host_bytes / steps

"""Hierarchical local SGD: exact data parallelism inside each host, local SGD between the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.config import Config
from hetexp.core.cost.calibration import Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.core.plan import Plan
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.local_sgd.prediction import sync_seconds

if TYPE_CHECKING:
    from hetexp.training.engine import Engine


class HierarchicalSGD(LocalSGD):
    """Sums gradients over the ranks of a host in every step, and averages the hosts' weights now and then.

    A host takes exactly the step that a single device would take with the host's part of the global batch.
    Between hosts it is `LocalSGD`: each host counts by the samples of all its ranks (Lin et al. 2020, Don't
    Use Large Mini-Batches, Use Local SGD, section 5). BatchNorm's statistics stay each rank's own until the
    next sync.

    Args:
        sync_every: steps from one average of the hosts' weights to the next.
        groups: ranks of each host, rising, `[[0,1],[2,3]]`; `None`: those whose devices are on one host.
        outer_lr: learning rate of the outer SGD; 1 takes the average itself. DiLoCo has 0.7, a momentum of
            0.9, Nesterov and AdamW.
        outer_momentum: momentum of the outer SGD.
        outer_nesterov: whether that momentum is Nesterov's.
        inner_state: optimizer's state at a sync: `keep` each host's own, `average` it as the weights, or
            `reset` it.
        wire: type that the change of the weights travels in. `float32` is the weights' own type; `bfloat16`
            and `int8` compress, with error feedback.
    """

    name: ClassVar[str] = "hierarchical_sgd"

    def __init__(
        self,
        sync_every: PositiveInt = 50,
        groups: list[list[int]] | None = None,
        outer_lr: PositiveFloat = 1.0,
        outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        outer_nesterov: bool = False,
        inner_state: Literal["keep", "average", "reset"] = "keep",
        wire: Literal["float32", "bfloat16", "int8"] = "float32",
    ) -> None:
        super().__init__(
            sync_every, "equal", None, outer_lr, outer_momentum, outer_nesterov, inner_state, wire
        )
        self._groups = groups

    def engine(self) -> Engine:
        from hetexp.strategy.hierarchical_sgd.engine import HierarchicalSteps

        return HierarchicalSteps(self, self.groups_of)

    def groups_of(self, devices: Sequence[DeviceSpec]) -> list[list[int]]:
        """Return the ranks of each host."""
        if self._groups is not None:
            return self._groups
        hosts: dict[str | None, list[int]] = {}
        for rank, device in enumerate(devices):
            hosts.setdefault(device.host, []).append(rank)
        return list(hosts.values())

    def step_exchange(self, exchange: Exchange, plan: Plan, devices: Sequence[DeviceSpec]) -> Exchange:
        """Return the exchange of a step: its part of a sync, and the slowest host's sum of gradients."""
        synced, longest = super().step_exchange(exchange, plan, devices), 0.0
        for group in self.groups_of(devices) if len(devices) > 1 else ():
            # A group counts as one host, also if the user has named groups of several hosts' devices.
            members = [replace(devices[rank], host=None) for rank in group]
            if len(members) > 1:
                inside = replace(exchange, measured=None)
                longest = max(longest, sync_seconds(inside, plan, members))
        return replace(synced, other_seconds=synced.other_seconds + longest)

    def may_leave_out(self, policy: BalancingPolicy) -> bool:
        return False  # every host takes part

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        problems = super().check(config, devices)
        groups = self._groups
        if groups is None:
            if len(self.groups_of(devices)) < 2:
                fix = (
                    "On one host, strategy.groups=[[0,1],[2,3]] would name the ranks that count as one host."
                )
                names = ", ".join(device.id for device in devices)
                accepted = f"ddp or local_sgd if all devices ({names}) are on one host"
                problems.append(must_be("strategy", accepted, self.name, fix))
            return problems
        if len(groups) < 2 or any(not group for group in groups):
            accepted = "two lists of ranks or more, each with at least one"
            problems.append(must_be("strategy.groups", accepted, groups))
        elif any(list(group) != sorted(set(group)) for group in groups):
            problems.append(must_be("strategy.groups", "lists of rising ranks", groups))
        elif sorted(rank for group in groups for rank in group) != list(range(len(devices))):
            accepted = f"lists that hold each rank from 0 to {len(devices) - 1} once"
            problems.append(must_be("strategy.groups", accepted, groups))
        return problems

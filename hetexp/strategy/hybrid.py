"""Several pipelines in data parallel: each trains on its part of the batch, and gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import PositiveInt

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.plan.exchange_checks import check_boundary_wire, check_wire, require_exchange
from hetexp.strategy.pipeline.schedules import ScheduleName
from hetexp.strategy.pipeline.shard_plan import Ranges
from hetexp.strategy.pipeline.staged import Staged


class Hybrid(Staged):
    """Cuts the model once a pipeline; pipelines may differ in their devices, their cuts and their samples.

    The devices of a pipeline together get the samples that `balancing` gives each of them. The result is
    exact, as a pipeline's is.

    Args:
        schedule: schedule of the microbatches, the same for all pipelines.
        num_microbatches: microbatches of a step of each pipeline; `None`: four for each stage, at most its
            samples.
        groups: ranks of each pipeline, rising, `[[0,1],[2]]`; `None`: the planner's choice.
        shard_plan: layers `[first, end)` of each pipeline's stages, `[[[0,4],[4,6]],[[0,6]]]`; `auto`: the
            planner's choice.
    """

    name: ClassVar[str] = "hybrid"
    exact = True

    def __init__(
        self,
        schedule: ScheduleName = "1F1B",
        num_microbatches: PositiveInt | None = None,
        groups: list[list[int]] | None = None,
        shard_plan: Literal["auto"] | list[list[list[int]]] = "auto",
    ) -> None:
        super().__init__(schedule, num_microbatches)
        self._groups = groups
        self._shard_plan = shard_plan

    def chosen_groups(self, num_devices: int) -> list[list[int]] | None:
        return self._groups

    def chosen_ranges(self) -> list[Ranges] | None:
        return None if self._shard_plan == "auto" else list(self._shard_plan)

    def keys(self) -> list[str]:
        return [f"strategy.shard_plan[{position}]" for position in range(len(self._shard_plan))]

    def check_exchange(self, config: Config) -> list[str]:
        return check_wire(config) + check_boundary_wire(config) + require_exchange(config, self.name)

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        problems = super().check(config, devices)
        if len(devices) < 3:
            names = ", ".join(device.id for device in devices)
            problems.append(
                f"`strategy` must be ddp or pipeline for fewer than three devices ({names}), but is 'hybrid' "
                "instead."
            )
            return problems
        wrong = self._check_groups(len(devices))
        return (
            problems + wrong + ([] if wrong or not self._groups else self.check_stages(self._groups, devices))
        )

    def _check_groups(self, num_devices: int) -> list[str]:
        groups, plan = self._groups, self._shard_plan
        if groups is None:
            if plan == "auto":
                return []
            return [must_be("strategy.groups", "given if `strategy.shard_plan` is", None)]
        problems = []
        if len(groups) < 2 or any(not group for group in groups):
            problems.append(
                must_be("strategy.groups", "two lists of ranks or more, each with at least one", groups)
            )
        if any(list(group) != sorted(set(group)) for group in groups):
            problems.append(must_be("strategy.groups", "lists of rising ranks", groups))
        elif sorted(rank for group in groups for rank in group) != list(range(num_devices)):
            accepted = f"lists that hold each rank from 0 to {num_devices - 1} once"
            problems.append(must_be("strategy.groups", accepted, groups))
        if plan != "auto" and len(plan) != len(groups):
            problems.append(
                f"`strategy.shard_plan` must have one list of ranges a group ({len(groups)}), but has "
                f"{len(plan)} instead."
            )
        return problems

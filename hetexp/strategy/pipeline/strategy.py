"""Pipeline parallelism: each device has some of the model's layers; microbatches pass through all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.strategy.pipeline.schedules import ScheduleName
from hetexp.strategy.pipeline.shard_plan import Ranges
from hetexp.strategy.pipeline.stage_entries import (
    check_entries,
    check_names,
    group_of,
    ranges_by_name,
    ranges_of,
)
from hetexp.strategy.pipeline.staged import Staged


class Pipeline(Staged):
    """Cuts the model between its layers, one piece a device in the order of the devices.

    The result is exact: the same step as one device's, whatever the cut, the schedule and the microbatches.

    Args:
        schedule: schedule of the microbatches. Schedules with several stages a device give each device two.
        num_microbatches: microbatches of a step; `None`: four for each stage, at most the batch.
        shard_plan: layers `[first, end)` of each stage, `[[0,4],[4,6]]`, or its device and blocks; `auto`:
            the planner's choice. `[{device: cuda:0, blocks: 4}, {device: xpu:0, blocks: 2}]` names devices
            (see `hetexp.strategy.pipeline.stage_entries`).
    """

    name: ClassVar[str] = "pipeline"
    exact = True

    def __init__(
        self,
        schedule: ScheduleName = "1F1B",
        num_microbatches: PositiveInt | None = None,
        shard_plan: Literal["auto"] | list[list[int]] | list[dict[str, Any]] = "auto",
    ) -> None:
        super().__init__(schedule, num_microbatches)
        stages = () if shard_plan == "auto" else shard_plan
        self._entries = [stage for stage in stages if isinstance(stage, Mapping)]
        """Stages that are given with their devices."""
        ranges = [list(stage) for stage in stages if not isinstance(stage, Mapping)]
        self._ranges: Ranges | None = None if shard_plan == "auto" else ranges

    def chosen_groups(self, num_devices: int) -> list[list[int]] | None:
        return [list(range(num_devices))]

    def chosen_ranges(self) -> list[Ranges] | None:
        ranges = ranges_of(self._entries) if self._entries else self._ranges
        return None if ranges is None else [ranges]

    def groups_on(self, devices: Sequence[DeviceSpec]) -> list[list[int]] | None:
        return [group_of(self._entries, devices)] if self._entries else super().groups_on(devices)

    def ranges_in(self, layers: Sequence[str]) -> list[Ranges] | None:
        if self._entries and self.chosen_ranges() is None:
            return [ranges_by_name(self._entries, layers)]
        return self.chosen_ranges()

    def check_layers(self, layers: Sequence[str]) -> list[str]:
        if self._entries and self.chosen_ranges() is None:
            return check_names(self._entries, layers)
        return super().check_layers(layers)

    def keys(self) -> list[str]:
        return ["strategy.shard_plan"]

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        problems = super().check(config, devices)
        if len(devices) < 2:
            names = ", ".join(device.id for device in devices)
            return [
                f"`strategy` must be single for one device ({names}), but is 'pipeline' instead, which takes "
                "at least two.",
                *problems,
            ]
        if self._entries:
            wrong = check_entries(self._entries, devices, self.schedule)
            return problems + (wrong or self.check_stages([list(range(len(devices)))], devices))
        return problems + self.check_stages([list(range(len(devices)))], devices)

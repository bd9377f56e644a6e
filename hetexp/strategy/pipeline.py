"""A pipeline: each device has some of the model's layers, and the microbatches of a step pass through all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import PositiveInt

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.strategy.schedules import ScheduleName
from hetexp.strategy.shard_plan import Ranges
from hetexp.strategy.staged import Staged


class Pipeline(Staged):
    """Cuts the model between its layers, one piece a device in the order of the devices.

    The result is exact: the same step as one device's, whatever the cut, the schedule and the microbatches.

    Args:
        schedule: one of torch's; those with several stages a device give each of them two.
        num_microbatches: of a step; `None`: four a stage, at most the batch.
        shard_plan: layers `[first, end)` of each stage; `auto` leaves the cut to the planner.
    """

    name: ClassVar[str] = "pipeline"

    def __init__(
        self,
        schedule: ScheduleName = "1F1B",
        num_microbatches: PositiveInt | None = None,
        shard_plan: Literal["auto"] | list[list[int]] = "auto",
    ) -> None:
        super().__init__(schedule, num_microbatches)
        self._shard_plan = shard_plan

    def chosen_groups(self, num_devices: int) -> list[list[int]] | None:
        return [list(range(num_devices))]

    def chosen_ranges(self) -> list[Ranges] | None:
        return None if self._shard_plan == "auto" else [self._shard_plan]

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
        return problems + self.check_stages([list(range(len(devices)))])

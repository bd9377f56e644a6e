"""What a policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from hetexp.balancing.scheduler import SchedulerSettings
from hetexp.core.device import DeviceSpec


class BalancingPolicy(ABC):
    """Decides which fraction of each global batch a device takes."""

    measures: bool = False
    """Whether the devices are measured before the run, and the split is the one that measures best."""

    follows: ClassVar[bool] = False
    """Whether the split follows the devices' speeds during the run, by the policy's `settings`."""
    settings: SchedulerSettings
    """How eagerly, where it does."""

    drop_slower: bool = True
    """Whether a device that was measured may be left out where the job is slower with it."""
    recalibrate: bool = False
    """Whether to measure also where the same devices were measured for the same job before."""

    @abstractmethod
    def shares(self, devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
        """Return one fraction a device, in the same order, summing to 1; nothing is measured yet.

        Args:
            precisions: what each device computes in.

        Raises:
            ConfigError: the policy's own configuration does not fit these devices.
        """

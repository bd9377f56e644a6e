"""The interface of a balancing policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from hetexp.balancing.scheduler import SchedulerSettings
from hetexp.core.device import DeviceSpec


class BalancingPolicy(ABC):
    """Decides each device's share of a global batch."""

    measures: bool = False
    """Whether the devices are measured before the run, to find the split with the shortest step."""

    follows: ClassVar[bool] = False
    """Whether the split follows the devices' speeds during the run, by the policy's `settings`."""
    settings: SchedulerSettings
    """Settings of a policy that follows the speeds."""

    drop_slower: bool = True
    """Whether a measured device may be left out if the job is slower with it."""
    recalibrate: bool = False
    """Whether to measure devices again that were measured for this job before."""

    @abstractmethod
    def shares(self, devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
        """Return the fraction of each device, before any measurement; the fractions sum to 1.

        Args:
            precisions: of each device's computation.

        Raises:
            ConfigError: the policy's own configuration does not fit these devices.
        """

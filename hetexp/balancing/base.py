"""What a policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hetexp.core.device import DeviceSpec


class BalancingPolicy(ABC):
    """Decides which fraction of each global batch a device takes."""

    @abstractmethod
    def shares(self, devices: Sequence[DeviceSpec]) -> tuple[float, ...]:
        """Return one fraction a device, in the same order, summing to 1.

        Raises:
            ConfigError: the policy's own configuration does not fit these devices.
        """

"""The same share for every device, as in other trainers."""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.device import DeviceSpec
from hetexp.core.split import normalise


class Equal(BalancingPolicy):
    """Gives each of n devices 1/n of the batch."""

    def shares(self, devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
        return normalise([1.0] * len(devices))

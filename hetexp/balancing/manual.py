"""Shares by the user's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.split import normalise


class Manual(BalancingPolicy):
    """Gives each device its weight's part of their sum.

    Args:
        weights: one weight for each device, in the order of the plan. A device with weight 0 has no samples,
            but stays in step with the others.
    """

    def __init__(self, weights: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]) -> None:
        if not any(weight > 0 for weight in weights):
            raise ConfigError(
                must_be("balancing.weights", "a list with at least one weight above 0", weights)
            )
        self.weights = weights

    def shares(self, devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
        if len(self.weights) != len(devices):
            names = ", ".join(device.id for device in devices)
            raise ConfigError(
                must_be("balancing.weights", f"{len(devices)} numbers, one a device ({names})", self.weights)
            )
        return normalise(self.weights)

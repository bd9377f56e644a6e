"""Facts about devices that ranks keep when their group changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetexp.training.state import TrainState


@dataclass(frozen=True)
class Carried:
    """Facts about devices, which hold whatever rank a device has in the next group."""

    limits: dict[str, int]
    """Device → most samples of a pass, if its memory ran out with more."""
    balancer: dict[str, Any] | None
    """The devices' speeds as the balancer has measured them."""

    @classmethod
    def of(cls, state: TrainState) -> Carried:
        """Return the facts of the present group."""
        pairs = zip(state.plan.devices, state.microbatch_limits, strict=True)
        limits = {device.id: limit for device, limit in pairs if limit is not None}
        return cls(limits, state.balancer.to_dict())

    def put_into(self, state: TrainState) -> None:
        """Put the facts into the state of the next group; all ranks do so alike."""
        state.microbatch_limits = [self.limits.get(device.id) for device in state.plan.devices]
        state.balancer.inherit(self.balancer)

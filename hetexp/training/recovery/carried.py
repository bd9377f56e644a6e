"""What ranks know of devices and take with them into their next group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetexp.training.state import TrainState


@dataclass(frozen=True)
class Carried:
    """What is known of devices, whatever rank they have in the next group."""

    limits: dict[str, int]
    """Device → most samples of a pass, where its memory ran out with more."""
    balancer: dict[str, Any] | None
    """What a policy has learned of their speeds."""

    @classmethod
    def of(cls, state: TrainState) -> Carried:
        """Return what is known in the present group."""
        pairs = zip(state.plan.devices, state.microbatch_limits, strict=True)
        limits = {device.id: limit for device, limit in pairs if limit is not None}
        return cls(limits, state.balancer.to_dict())

    def put_into(self, state: TrainState) -> None:
        """Let the next group know it; all ranks do so alike."""
        state.microbatch_limits = [self.limits.get(device.id) for device in state.plan.devices]
        state.balancer.inherit(self.balancer)

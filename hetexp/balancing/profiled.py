"""Shares by measurement: each device's time at several batch sizes, and the split with the shortest step."""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.tflops import assumed_shares
from hetexp.core.device import DeviceSpec


class Profiled(BalancingPolicy):
    """Measures the devices before the run, and leaves out a device that makes the job slower.

    Args:
        drop_slower: whether to leave out a device that makes the job slower. Otherwise such a device may get
            no samples, but it stays in step.
        recalibrate: whether to measure devices again that were measured for this job before.
    """

    measures = True

    def __init__(self, drop_slower: bool = True, recalibrate: bool = False) -> None:
        self.drop_slower = drop_slower
        self.recalibrate = recalibrate

    def shares(self, devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
        """Return the devices' shares during the measurement."""
        return assumed_shares(devices, precisions)

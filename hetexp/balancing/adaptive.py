"""Shares that follow the devices' speeds while they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.scheduler import SchedulerSettings
from hetexp.balancing.tflops import assumed_shares
from hetexp.core.device import DeviceSpec


class Adaptive(BalancingPolicy):
    """Starts from estimates of the devices, measures their work in training, and splits again if that pays.

    The estimates come from a calibration of this run or an earlier run of the same job, else the catalogue.

    Args:
        calibrate: whether to measure the devices before the run, as `profiled` does.
        drop_slower: whether to leave out a device that makes the job slower, if it was measured.
        recalibrate: whether to ignore what earlier runs measured of these devices.
        min_gain: smallest predicted gain in speed, as a fraction, that changes the split.
        max_move: largest fraction of the batch that changes ranks from one step to the next.
        probe_every: steps after which a device without samples is tried again; 0: never.
    """

    follows: ClassVar[bool] = True

    def __init__(
        self,
        calibrate: bool = False,
        drop_slower: bool = True,
        recalibrate: bool = False,
        min_gain: NonNegativeFloat = 0.02,
        max_move: Annotated[float, Field(gt=0, le=1)] = 0.25,
        probe_every: NonNegativeInt = 50,
    ) -> None:
        self.measures = calibrate
        self.drop_slower = drop_slower
        self.recalibrate = recalibrate
        self.settings = SchedulerSettings(min_gain=min_gain, max_move=max_move, probe_every=probe_every)

    def shares(self, devices: Sequence[DeviceSpec], precisions: Sequence[str]) -> tuple[float, ...]:
        """Return the shares by the catalogue's rates; equal shares if it does not know all devices."""
        return assumed_shares(devices, precisions)

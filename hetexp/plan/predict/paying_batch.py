"""The smallest global batch with which it pays to train on all devices.

An exchange takes as long for a small batch as for a large one. So a device that makes the steps of a small
batch longer may make those of a larger batch shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.plan import Plan
from hetexp.plan.calibrated_plan import Choice, choose, holds

LARGEST_MULTIPLE = 64
"""Largest batch that is tried, as a multiple of the run's."""


@dataclass(frozen=True)
class BatchPrediction:
    """The fastest exact step of some devices with one global batch."""

    batch_size: int
    num_devices: int
    """Devices that the step uses."""
    gain: float | None
    """Speed of the step ÷ speed of the fastest device alone, both with this batch; `None` if no device alone
    holds it."""


def paying_batch(
    predict: Callable[[int], BatchPrediction | None],
    batch_size: int,
    num_devices: int,
    largest_multiple: int = LARGEST_MULTIPLE,
) -> BatchPrediction | None:
    """Return the smallest batch whose fastest step uses all devices; `None` if there is none.

    The run's own batch is tried first, then twice that, four times that, and so on.

    Args:
        predict: global batch → its prediction; `None` for a batch that the devices do not hold, which ends
            the search. `batch_predictor` makes such a function.
        batch_size: the run's.
        num_devices: all devices.
        largest_multiple: largest batch ÷ the run's.
    """
    multiple = 1
    while multiple <= largest_multiple:
        prediction = predict(batch_size * multiple)
        if prediction is None or prediction.num_devices == num_devices:
            return prediction
        multiple *= 2
    return None


def batch_predictor(
    plan: Plan,
    devices: Sequence[DeviceCalibration],
    exchange: Exchange,
    limited: Callable[[int], Sequence[DeviceCalibration]] | None = None,
) -> Callable[[int], BatchPrediction | None]:
    """Return a function that predicts other global batches on a plan's devices.

    Args:
        plan: of all devices, before any is left out.
        devices: calibrations, one for each device of the plan.
        exchange: of a step, as the run's strategy makes it.
        limited: global batch → the calibrations with the limits of the devices' memory; by default they are
            the same for each batch.
    """

    def predict(batch_size: int) -> BatchPrediction | None:
        able = devices if limited is None else limited(batch_size)
        try:
            choice = choose(of_batch(plan, batch_size), able, exchange)
        except ValueError:
            return None
        return BatchPrediction(batch_size, len(choice.ranks), gain_of(choice, able, exchange))

    return predict


def of_batch(plan: Plan, batch_size: int) -> Plan:
    """Return the plan with another global batch in its configuration; its split stays."""
    trainer = {**plan.config["trainer"], "global_batch_size": batch_size}
    return replace(plan, config={**plan.config, "trainer": trainer})


def gain_of(choice: Choice, devices: Sequence[DeviceCalibration], exchange: Exchange) -> float | None:
    """Return how many times as fast a choice is as the fastest device alone with the same batch.

    `None` if no device alone holds the batch.
    """
    total = choice.split.total
    alone = [
        device.curve.seconds(total) + exchange.data_seconds
        for rank, device in enumerate(devices)
        if holds(devices, [rank], total)
    ]
    return min(alone) / choice.step_seconds if alone else None

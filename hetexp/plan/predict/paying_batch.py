"""The smallest global batch with which it pays to train on all devices.

An exchange takes as long for a small batch as for a large one. So a device that makes the steps of a small
batch longer may make those of a larger batch shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.plan import Plan
from hetexp.plan.calibrated_plan import choose, holds

LARGEST_MULTIPLE = 64
"""Largest batch that is tried, as a multiple of the run's."""


@dataclass(frozen=True)
class BatchPrediction:
    """The fastest exact step of some devices with one global batch."""

    batch_size: int
    num_devices: int
    """Devices that the step uses."""
    gain: float | None
    """Its speed ÷ that of the fastest device alone with this batch; `None` if no device alone holds it."""


def paying_batch(
    predict: Callable[[int], BatchPrediction | None],
    batch_size: int,
    num_devices: int,
    largest_multiple: int = LARGEST_MULTIPLE,
) -> BatchPrediction | None:
    """Return the smallest batch whose fastest step uses so many devices; `None` if there is none.

    Args:
        predict: global batch → its prediction; `None` for a batch that the devices do not hold, which ends
            the search. `batch_predictor` makes such a function.
        batch_size: tried first, then twice that, four times that, up to `largest_multiple` times.
        num_devices: fewest devices, usually all.
    """
    multiple = 1
    while multiple <= largest_multiple:
        prediction = predict(batch_size * multiple)
        if prediction is None or prediction.num_devices >= num_devices:
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
        trainer = {**plan.config["trainer"], "global_batch_size": batch_size}
        try:
            choice = choose(replace(plan, config={**plan.config, "trainer": trainer}), able, exchange)
        except ValueError:  # the devices' memory does not hold it
            return None
        pairs = [(holds(able, [rank], batch_size), one) for rank, one in enumerate(able)]
        alone = [one.curve.seconds(batch_size) + exchange.data_seconds for fits, one in pairs if fits]
        gain = min(alone) / choice.step_seconds if alone else None
        return BatchPrediction(batch_size, len(choice.ranks), gain)

    return predict

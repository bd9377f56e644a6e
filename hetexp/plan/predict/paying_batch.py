"""The smallest global batch with which it pays to train on all devices, and the sentence that says so.

An exchange takes as long for a small batch as for a large one. So a device that makes the steps of a small
batch longer may make those of a larger batch shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.device import plain_name
from hetexp.core.plan import Plan
from hetexp.plan.calibrated_plan import Choice, best_split, choose, fastest_first, holds

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
        return BatchPrediction(batch_size, len(choice.ranks), gain_of(choice, able, exchange))

    return predict


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


def headline(plan: Plan, devices: Sequence[DeviceCalibration], exchange: Exchange, choice: Choice) -> str:
    """Return which devices train, how much faster than the fastest one alone, and what would change that.

    Args:
        plan: of all devices, before any is left out.
        devices: calibrations, one for each device of the plan.
        exchange: of a step, as the run's strategy makes it.
        choice: the devices that train.
    """
    total, everybody = choice.split.total, range(plan.world_size)
    names = [plain_name(device.name) for device in plan.devices]
    if len(set(names)) < len(names):
        names = [f"{name} ({device.id})" for name, device in zip(names, plan.devices, strict=True)]
    fastest = names[fastest_first(devices, total)[0]]
    left_out = [names[rank] for rank in everybody if rank not in choice.ranks]
    gain = gain_of(choice, devices, exchange)
    if not left_out:
        if gain is None:
            return f"{' and '.join(names)} train together; no device alone holds the batch."
        text = f"{' and '.join(names)} train together, predicted {gain:.2f}× as fast as the {fastest} alone."
        if gain >= 1.0:
            return text
    else:
        whole = best_split(plan, devices, exchange, tuple(everybody))
        slower = f"{whole.step_seconds / choice.step_seconds:.2f}× as long"
        verb = "is" if len(left_out) == 1 else "are"
        text = f"{' and '.join(left_out)} {verb} left out: with all devices a step would take {slower}."
    larger = paying_batch(batch_predictor(plan, devices, exchange), 2 * total, plan.world_size)
    if larger is not None and larger.gain is not None and larger.gain > 1.0:
        faster = f"{larger.gain:.2f}× as fast as the {fastest} alone"
        text += f" With trainer.global_batch_size={larger.batch_size} all of them pay: {faster}."
    return text

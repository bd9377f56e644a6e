"""The efficiency of a run: its speed ÷ that of its devices alone, and the causes of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetexp.balancing.accounting import Account, account
from hetexp.balancing.solver import solo_rates
from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.plan import Plan
from hetexp.training.measuring.timer import Totals
from hetexp.training.state import TrainState


def account_for(
    state: TrainState, summary: dict[str, Any], totals: Totals, ranks: Sequence[dict[str, Any]]
) -> None:
    """Add to the summary the exchange's exposed time, and the efficiency by the devices' own speeds.

    Args:
        totals: without the warm-up.
        ranks: each rank's measurements (`hetexp.training.measuring.result`).
    """
    if not totals.steps:
        return
    # The slowest rank never waits for another's work, only for the exchange.
    summary["comm"]["exposed_s"] = min(rank["own"]["waited"] for rank in ranks) / totals.steps
    exchanged = [rank["exchanged"] for rank in ranks if rank["exchanged"] is not None]
    summary["comm"]["exchange_s"] = min(exchanged) if len(exchanged) == len(ranks) else None
    counts = state.balancer.now(state.config.trainer.global_batch_size).counts
    own = [rank["own"] for rank in ranks]
    if (state.plan.calibration or {}).get("predicted_step_seconds") is not None:
        accounted = _by_calibration(state.plan, summary, totals, counts, own, state.time_scale or 1.0)
    else:
        accounted = _by_own_work(summary, totals, counts, own)
    for device, solo in zip(summary["devices"], accounted.pop("solo", []), strict=False):
        device["solo_samples_per_s"] = solo
    summary |= accounted


def _by_calibration(
    plan: Plan,
    summary: dict[str, Any],
    totals: Totals,
    counts: Sequence[int],
    ranks: Sequence[dict[str, float]],
    scale: float,
) -> dict[str, Any]:
    """Return the summary's fields of efficiency, by the curves measured before the run.

    Args:
        counts: the split; the last one if it followed the devices' speeds.
        ranks: each rank's own work in the run.
        scale: real seconds a second of the calibration's clock.
    """
    assert plan.calibration is not None
    predicted = plan.calibration["predicted_step_seconds"]
    full_step = plan.config["trainer"]["global_batch_size"] / summary["samples_per_s"] / scale
    curves = [DeviceCalibration.from_dict(device).curve for device in plan.calibration["devices"]]
    data = totals.data_seconds / totals.steps / scale
    accounted = account(curves, counts, predicted, predicted, full_step, data)
    # As fast as each device was in this run, which may differ from the moment of its measurement.
    now = [_as_in_run(curve, rank, totals.steps, scale) for curve, rank in zip(curves, ranks, strict=True)]
    alone = solo_rates([replace(c, update_seconds=c.update_seconds + data) for c in now], sum(counts))
    fields = _fields(accounted, "calibration", scale)
    return fields | _beside_fastest(summary, alone, scale) | {"predicted_step_s": predicted * scale}


def _as_in_run(curve: SpeedCurve, rank: dict[str, float], steps: int, scale: float) -> SpeedCurve:
    """Return a measured curve at the speed that the device had in the run.

    Args:
        rank: its own work in so many steps: `samples`, and `compute` in real seconds.
    """
    samples = round(rank["samples"] / steps)
    if not samples or not rank["compute"]:
        return curve
    return curve.scaled(rank["compute"] / scale / steps / curve.compute_seconds(samples))


def _beside_fastest(summary: dict[str, Any], alone: Sequence[float], scale: float) -> dict[str, Any]:
    """Return the summary's field of the run's speed ÷ that of the fastest of its devices alone.

    Args:
        alone: samples a modelled second of each device alone.
    """
    if len(alone) < 2 or len(summary["devices"]) != len(alone):
        return {}
    best = max(range(len(alone)), key=alone.__getitem__)
    speed = alone[best] / scale
    return {
        "fastest_alone": {
            "device": summary["devices"][best]["id"],
            "samples_per_s": speed,
            "gain": summary["samples_per_s"] / speed,
        }
    }


def _by_own_work(
    summary: dict[str, Any], totals: Totals, counts: Sequence[int], ranks: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Return these fields by each device's own work during the run, if nothing was measured before it.

    A device's time is assumed to be proportional to its samples, so large fixed costs make the device look
    slower than it is. A single device, or one without samples, gives no fields.
    """
    if len(ranks) < 2 or not all(rank["compute"] > 0 and rank["samples"] for rank in ranks):
        return {}
    # A rank's time beyond the smallest is waiting for others and rank 0's log, not its device's own.
    update = max(min(rank["rest"] for rank in ranks), 0.0) / totals.steps
    curves = [SpeedCurve(0.0, rank["compute"] / rank["samples"], update_seconds=update) for rank in ranks]
    full_step = sum(counts) / summary["samples_per_s"]
    slowest = max(curve.seconds(count) for curve, count in zip(curves, counts, strict=True))
    joint = slowest + summary["comm"]["exposed_s"]
    data = totals.data_seconds / totals.steps
    accounted = account(curves, counts, joint, joint, full_step, data)
    beside = _beside_fastest(summary, accounted.solo_samples_per_second, 1.0)
    return _fields(accounted, "run", 1.0) | beside


def _fields(accounted: Account, source: str, scale: float) -> dict[str, Any]:
    solo = accounted.solo_samples_per_second
    return {
        "solo_samples_per_s": sum(solo) / scale,
        "solo_source": source,
        "ceiling": accounted.ceiling if source == "calibration" else None,
        "efficiency": accounted.efficiency,
        "lost_to": accounted.lost_to,
        "solo": [rate / scale for rate in solo],
    }

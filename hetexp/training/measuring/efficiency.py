"""How near a run came to what its devices do alone, and where the rest of the time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetexp.balancing.accounting import Account, account
from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.plan import Plan
from hetexp.training.measuring.timer import Totals
from hetexp.training.state import TrainState


def account_for(
    state: TrainState, summary: dict[str, Any], totals: Totals, ranks: Sequence[dict[str, Any]]
) -> None:
    """Add to the summary the exchange's exposed time, and how near the run came to its devices' own speeds.

    Args:
        totals: settled.
        ranks: what each rank measured (`hetexp.training.measuring.result`).
    """
    if not totals.steps:
        return
    # The rank that never waits for another's work waits for the exchange alone.
    summary["comm"]["exposed_s"] = min(rank["own"]["waited"] for rank in ranks) / totals.steps
    exchanged = [rank["exchanged"] for rank in ranks if rank["exchanged"] is not None]
    summary["comm"]["exchange_s"] = min(exchanged) if len(exchanged) == len(ranks) else None
    counts = state.balancer.now(state.config.trainer.global_batch_size).counts
    if (state.plan.calibration or {}).get("predicted_step_seconds") is not None:
        accounted = _by_calibration(state.plan, summary, totals, counts, state.time_scale or 1.0)
    else:
        accounted = _by_own_work(summary, totals, counts, [rank["own"] for rank in ranks])
    for device, solo in zip(summary["devices"], accounted.pop("solo", []), strict=False):
        device["solo_samples_per_s"] = solo
    summary |= accounted


def _by_calibration(
    plan: Plan, summary: dict[str, Any], totals: Totals, counts: Sequence[int], scale: float
) -> dict[str, Any]:
    """Return the fields that say how near the run came to what its devices do alone, as measured before.

    Args:
        counts: the split, at the end where it followed the devices' speeds.
        scale: real seconds a second of the calibration's clock.
    """
    assert plan.calibration is not None
    predicted = plan.calibration["predicted_step_seconds"]
    full_step = plan.config["trainer"]["global_batch_size"] / summary["samples_per_s"] / scale
    curves = [DeviceCalibration.from_dict(one).curve for one in plan.calibration["devices"]]
    data = totals.data_seconds / totals.steps / scale
    found = account(curves, counts, predicted, predicted, full_step, data)
    return _fields(found, "calibration", scale) | {"predicted_step_s": predicted * scale}


def _by_own_work(
    summary: dict[str, Any], totals: Totals, counts: Sequence[int], own: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Return these fields from each device's own work during the run, where nothing was measured before it.

    A device's time is taken to grow with its samples, so that large fixed costs make its own speed look
    lower than it is. Nothing is reported if a device had no samples, or of a device alone.
    """
    if len(own) < 2 or not all(one["compute"] > 0 and one["samples"] for one in own):
        return {}
    # What is more than the least of them is waiting for others and rank 0's log, not the device's own.
    update = max(min(one["rest"] for one in own), 0.0) / totals.steps
    curves = [SpeedCurve(0.0, one["compute"] / one["samples"], update_seconds=update) for one in own]
    full_step = sum(counts) / summary["samples_per_s"]
    slowest = max(curve.seconds(count) for curve, count in zip(curves, counts, strict=True))
    joint = slowest + summary["comm"]["exposed_s"]
    data = totals.data_seconds / totals.steps
    return _fields(account(curves, counts, joint, joint, full_step, data), "run", 1.0)


def _fields(found: Account, source: str, scale: float) -> dict[str, Any]:
    return {
        "solo_samples_per_s": sum(found.solo_samples_per_second) / scale,
        "solo_source": source,
        "ceiling": found.ceiling if source == "calibration" else None,
        "efficiency": found.efficiency,
        "lost_to": found.lost_to,
        "solo": [one / scale for one in found.solo_samples_per_second],
    }

"""The plan of some of a plan's devices, after a device is lost or has joined.

A training waits for it, so that it is only arithmetic on the plan's own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.plan.calibrated_plan import best_split, holds
from hetexp.plan.routes import routed

USED_MEMORY = 0.9
"""Largest fraction of a device's memory for a pass that is larger than planned."""


def replan(whole: Plan, places: Sequence[int]) -> Plan:
    """Return the plan of some devices of a plan with a replica on each device.

    The global batch stays. If the devices were measured together, the split is the one with the shortest
    step. Otherwise each device gets more samples in proportion to its share. A device whose memory does not
    hold its larger part takes it in several passes.

    Args:
        places: of the devices that take part, in rising order.
    """
    if len(places) == whole.world_size:
        return whole

    total = sum(whole.local_batch_sizes)
    shares, calibration = _shares(whole, places)
    local = apportion(total, shares).counts
    limits = [_passes(whole, place, count) for place, count in zip(places, local, strict=True)]
    pairs = zip(places, local, strict=True)
    split = ", ".join(f"{whole.devices[place].id} {count}" for place, count in pairs)
    absent = ", ".join(device.id for place, device in enumerate(whole.devices) if place not in places)
    return routed(
        whole.of_ranks(
            places,
            [f"Without {absent}: {split} of the {total} samples of a step."],
            shares=shares,
            local_batch_sizes=local,
            microbatch_sizes=tuple(limits) if any(limits) else (),
            calibration=calibration,
        )
    )


def extended(whole: Plan, device: DeviceSpec, share: float, precision: str, threads: int) -> Plan:
    """Return the plan with one more device at its end.

    Args:
        share: of the new device.
    """
    shares = (*(old_share * (1 - share) for old_share in whole.shares), share)
    local = apportion(sum(whole.local_batch_sizes), shares).counts
    split = ", ".join(f"{d.id} {n}" for d, n in zip((*whole.devices, device), local, strict=True))
    return routed(
        replace(
            whole,
            devices=(*whole.devices, device),
            shares=shares,
            local_batch_sizes=local,
            threads=(*whole.threads, threads),
            precisions=(*whole.precisions, precision) if whole.precisions else (),
            microbatch_sizes=(*whole.microbatch_sizes, None) if whole.microbatch_sizes else (),
            memory_bytes=(*whole.memory_bytes, None) if whole.memory_bytes else (),
            calibration=None,  # the new device is not measured
            reasons=(f"{device.id} was added: {split} samples of a step.", *whole.reasons),
        )
    )


def _shares(whole: Plan, places: Sequence[int]) -> tuple[tuple[float, ...], dict[str, Any] | None]:
    """Return the devices' shares, and their measurements."""
    sum_of_shares = sum(whole.shares[place] for place in places)
    if sum_of_shares > 0:
        shares = tuple(whole.shares[place] / sum_of_shares for place in places)
    else:  # the devices had no samples so far
        shares = (1 / len(places),) * len(places)
    measured = whole.calibration
    if measured is None:
        return shares, None
    devices = [DeviceCalibration.from_dict(raw) for raw in measured["devices"]]
    total = sum(whole.local_batch_sizes)
    kept = {**measured, "devices": [measured["devices"][place] for place in places]}
    if measured["exchange"] is None or not holds(devices, places, total):
        return shares, {**kept, "predicted_step_seconds": None}
    choice = best_split(whole, devices, Exchange.from_dict(measured["exchange"]), places)
    shares = tuple(count / total for count in choice.split.counts)
    return shares, {**kept, "predicted_step_seconds": choice.step_seconds}


def _passes(whole: Plan, place: int, count: int) -> int | None:
    """Return the most samples of a pass of a device that gets `count` samples.

    The estimate is high: the need of a pass grows with its samples, including the part of the weights.
    """
    limit = whole.microbatch_sizes[place] if whole.microbatch_sizes else None
    need = whole.memory_bytes[place] if whole.memory_bytes else None
    has = whole.devices[place].memory_bytes
    planned = min(whole.local_batch_sizes[place], limit or whole.local_batch_sizes[place])
    if need is None or has is None or not planned or count <= planned:
        return limit
    fits = int(planned * max(1.0, USED_MEMORY * has / need))
    return min(limit or fits, fits) if fits < count else limit

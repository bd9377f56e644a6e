"""The plan of some of a plan's devices: what is left of it when a device is lost, and what is back with it.

It is made while a training waits for it, so that everything here is arithmetic on what the plan knows.
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
"""Part of a device's memory that a pass may be foreseen to take when it gets larger than planned."""


def replan(whole: Plan, places: Sequence[int]) -> Plan:
    """Return the plan of some devices of a plan whose strategy gives each a replica; the plan itself for all.

    The global batch stays. Where the devices were measured together the split is the one that then ends a
    step soonest, else each gets more in proportion to its share. A device whose memory would not hold its
    larger part in one pass takes it in several.

    Args:
        places: of those that take part, in rising order.
    """
    if len(places) == whole.world_size:
        return whole

    total = sum(whole.local_batch_sizes)
    shares, calibration = _shares(whole, places)
    local = apportion(total, shares).counts
    limits = [_passes(whole, place, count) for place, count in zip(places, local, strict=True)]
    pairs = zip(places, local, strict=True)
    split = ", ".join(f"{whole.devices[place].id} {count}" for place, count in pairs)
    absent = ", ".join(one.id for place, one in enumerate(whole.devices) if place not in places)
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
        share: its part of what all have then.
    """
    shares = (*(one * (1 - share) for one in whole.shares), share)
    local = apportion(sum(whole.local_batch_sizes), shares).counts
    split = ", ".join(f"{one.id} {n}" for one, n in zip((*whole.devices, device), local, strict=True))
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
            calibration=None,  # nothing is measured of the new one
            reasons=(f"{device.id} was added: {split} samples of a step.", *whole.reasons),
        )
    )


def _shares(whole: Plan, places: Sequence[int]) -> tuple[tuple[float, ...], dict[str, Any] | None]:
    """Return the devices' shares, and what is known of these devices by measurement."""
    rest = sum(whole.shares[place] for place in places)
    # Those that are left may have had nothing to do so far.
    shares = tuple(whole.shares[place] / rest if rest > 0 else 1 / len(places) for place in places)
    known = whole.calibration
    if known is None:
        return shares, None
    own = [DeviceCalibration.from_dict(one) for one in known["devices"]]
    total = sum(whole.local_batch_sizes)
    left = {**known, "devices": [known["devices"][place] for place in places]}
    if known["exchange"] is None or not holds(own, places, total):
        return shares, {**left, "predicted_step_seconds": None}
    choice = best_split(whole, own, Exchange.from_dict(known["exchange"]), places)
    shares = tuple(count / total for count in choice.split.counts)
    return shares, {**left, "predicted_step_seconds": choice.step_seconds}


def _passes(whole: Plan, place: int, count: int) -> int | None:
    """Return the most samples of a pass of a device that gets `count` of them.

    What a pass needs is taken to grow with its samples, the weights' part included: rather too much.
    """
    limit = whole.microbatch_sizes[place] if whole.microbatch_sizes else None
    need = whole.memory_bytes[place] if whole.memory_bytes else None
    has = whole.devices[place].memory_bytes
    planned = min(whole.local_batch_sizes[place], limit or whole.local_batch_sizes[place])
    if need is None or has is None or not planned or count <= planned:
        return limit
    fits = int(planned * max(1.0, USED_MEMORY * has / need))
    return min(limit or fits, fits) if fits < count else limit

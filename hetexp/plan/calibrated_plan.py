"""From measurements of the devices to the plan: its devices, their shares, and the predicted step.

A device takes part only if it makes the step shorter: it gains its share of the work, and costs its exchange,
its fixed costs and the wait for it. The sets grow from the fastest device alone by the next fastest one, and
the set with the shortest predicted step wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetexp.balancing.solver import solve
from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.split import Split
from hetexp.hardware.links import links_of
from hetexp.plan.routes import routed

LEAST_GAIN = 0.01
"""Least relative gain by which a device takes part, because a smaller one cannot be measured."""
GAIN_OVER_BEFORE = 0.1
"""Least relative gain by which other devices take part than in earlier runs of a job. Measurements of a busy
machine differ by less, and the same command should train on the same devices."""


@dataclass(frozen=True)
class Choice:
    """The devices that take part, with their split and predicted step."""

    ranks: tuple[int, ...]
    """Their ranks in the measured plan."""
    split: Split
    """Split of the global batch over them."""
    step_seconds: float
    reasons: tuple[str, ...]


def choose(
    plan: Plan,
    devices: Sequence[DeviceCalibration],
    exchange: Exchange,
    drop_slower: bool = True,
    before: Sequence[int] | None = None,
) -> Choice:
    """Return the set of devices and the split with the shortest predicted step.

    Args:
        plan: of the measured devices.
        drop_slower: whether devices may be left out.
        before: ranks of the devices that trained in earlier runs of the job, which do so again unless others
            are faster by `GAIN_OVER_BEFORE`.

    Raises:
        ValueError: the devices' memory together does not hold the batch.
    """
    total = plan.config["trainer"]["global_batch_size"]
    ordered = fastest_first(devices, total)
    sets = growing_sets(ordered)
    if not drop_slower:
        sets = sets[-1:]
    # A set whose memory does not hold the batch is skipped; all devices together must hold it.
    tried = [best_split(plan, devices, exchange, s) for s in sets[:-1] if holds(devices, s, total)]
    tried.append(best_split(plan, devices, exchange, sets[-1]))
    best = tried[0]
    for choice in tried[1:]:
        if choice.step_seconds < best.step_seconds * (1 - LEAST_GAIN):
            best = choice
    names = [str(device) for device in plan.devices]
    reasons = []
    if drop_slower and before is not None and tuple(before) != best.ranks and holds(devices, before, total):
        same = best_split(plan, devices, exchange, before)
        if best.step_seconds > same.step_seconds * (1 - GAIN_OVER_BEFORE):
            reasons.append(
                f"The same devices train as in earlier runs of this job, as others are predicted to be only "
                f"{same.step_seconds / best.step_seconds - 1:.0%} faster; balancing.recalibrate=true chooses "
                "again."
            )
            best = same
    for rank in ordered:
        if rank not in best.ranks:
            whole = best_split(plan, devices, exchange, tuple(sorted((*best.ranks, rank))))
            reasons.append(
                f"{names[rank]} is left out: with it a step is predicted to take {whole.step_seconds:.4g} s, "
                f"without it {best.step_seconds:.4g} s."
            )
    counts = ", ".join(
        f"{plan.devices[rank].id} {count}" for rank, count in zip(best.ranks, best.split.counts, strict=True)
    )
    reasons.append(
        f"Measured, the split of {total} samples that ends a step soonest: {counts}; predicted "
        f"{best.step_seconds:.4g} s a step."
    )
    return replace(best, reasons=tuple(reasons))


def fastest_first(devices: Sequence[DeviceCalibration], total: int) -> list[int]:
    """Return the ranks of the devices, sorted by the time of so many samples on each device alone."""
    return sorted(range(len(devices)), key=lambda rank: (devices[rank].curve.seconds(total), rank))


def growing_sets(ordered: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets of the first rank, the first two ranks, and so on, each in rising order."""
    return [tuple(sorted(ordered[:count])) for count in range(1, len(ordered) + 1)]


def holds(devices: Sequence[DeviceCalibration], ranks: Sequence[int], total: int) -> bool:
    """Return whether a set of the devices holds a batch of so many samples."""
    caps = [devices[rank].curve.cap for rank in ranks]
    return None in caps or sum(cap or 0 for cap in caps) >= total


def best_split(
    plan: Plan, devices: Sequence[DeviceCalibration], exchange: Exchange, ranks: Sequence[int]
) -> Choice:
    """Return the best split over a set of the plan's devices, with its predicted step."""
    total = plan.config["trainer"]["global_batch_size"]
    split = solve([devices[rank].curve for rank in ranks], total)
    specs = [plan.devices[rank] for rank in ranks]
    chosen = [devices[rank] for rank in ranks]
    seconds = step_of(plan, specs, chosen, exchange, split.counts)
    return Choice(tuple(ranks), split, seconds, ())


def step_of(
    plan: Plan,
    specs: Sequence[DeviceSpec],
    devices: Sequence[DeviceCalibration],
    exchange: Exchange,
    counts: Sequence[int],
) -> float:
    """Return the predicted seconds of a step of these devices with so many samples each.

    Args:
        specs: the plan's devices with their links.
    """
    links = links_of(plan, specs, exchange.measured)
    return joint_seconds(devices, counts, links, exchange)


def calibrated_plan(
    plan: Plan,
    devices: Sequence[DeviceCalibration],
    exchange: Mapping[str, Any],
    choice: Choice,
    source: Mapping[str, Any] | None = None,
    headline: str = "",
) -> Plan:
    """Return the plan of the chosen devices, with their measurements.

    Args:
        exchange: plain types of the `Exchange` of the choice.
        source: time of the measurement, whether it was kept, the names of its entries
            (`hetexp.plan.calibrations`), and the pace of emulated devices.
        headline: as of the plan.
    """
    total = plan.config["trainer"]["global_batch_size"]
    changed = plan.of_ranks(
        choice.ranks,
        choice.reasons,
        left_out=tuple(device for rank, device in enumerate(plan.devices) if rank not in choice.ranks),
        shares=tuple(count / total for count in choice.split.counts),
        local_batch_sizes=choice.split.counts,
        microbatch_sizes=tuple(devices[rank].curve.microbatch_size for rank in choice.ranks),
        memory_bytes=(),
        headline=headline,
        calibration={
            "devices": [devices[rank].to_dict() for rank in choice.ranks],
            "exchange": exchange,
            "predicted_step_seconds": choice.step_seconds,
            **(source or {}),
        },
    )
    return routed(changed)


def start_from_estimates(
    plan: Plan, known: Sequence[DeviceCalibration | None], caps: Sequence[int | None]
) -> Plan:
    """Return the plan with a split by measurements of each device alone; unchanged if one is missing.

    The exchange is not known, so that no step is predicted and no device is left out.
    """
    devices = [device.capped(cap) for device, cap in zip(known, caps, strict=True) if device is not None]
    total = plan.config["trainer"]["global_batch_size"]
    if len(devices) < len(known) or not holds(devices, range(len(devices)), total):
        return plan
    counts = solve([device.curve for device in devices], total).counts
    split = ", ".join(f"{device.id} {count}" for device, count in zip(plan.devices, counts, strict=True))
    return plan.of_ranks(
        range(plan.world_size),
        [f"Each device was measured in an earlier run; it begins with {split} samples."],
        shares=tuple(count / total for count in counts),
        local_batch_sizes=counts,
        calibration={
            "devices": [device.to_dict() for device in devices],
            "exchange": None,
            "predicted_step_seconds": None,
        },
    )

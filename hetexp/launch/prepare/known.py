"""What is known of a plan's devices before they train: kept measurements, else the catalogue."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetexp.core.compose.options import group_options
from hetexp.core.plan import Plan
from hetexp.plan import calibrations
from hetexp.plan.known import MEASURED, Known
from hetexp.plan.run_spec import RunSpec

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory

MEASURES = "ddp"
"""Option of the strategy that devices are measured under, whatever another one would make of them."""


def memory_of(plan: Plan, spec: RunSpec) -> RunMemory:
    """Return the memory estimates of a plan's devices; data set and model are built for them."""
    from hetexp.training.measuring.estimate import RunMemory

    places = range(len(plan.all_devices))
    counts = [plan.batch_size_of(place) for place in places]
    precisions = [plan.precisions[plan.rank_of(place)] for place in places]
    return RunMemory(spec.config, plan.all_devices, counts, precisions, spec.strategy)


def known_of(plan: Plan, spec: RunSpec, memory: RunMemory) -> Known:
    """Return what is known of each device of a plan, and what they exchange.

    A device's own work in a pass over the whole model is the same under any strategy: what was measured of
    the same job under DDP counts as well, of all devices together, or else of each by itself.

    Args:
        memory: holds the run's model and a sample.
    """
    from hetexp.training.measuring.catalogue_curves import exchange_of, known_from_catalogue

    config, strategy = spec.config, spec.strategy
    other = like_ddp(spec)
    likes = [config] if other is spec else [config, other.config]
    for like in likes:
        cached = calibrations.find(plan, like)
        if cached is not None:
            return Known.measured(plan.devices, cached.devices, cached.exchange)
    known = known_from_catalogue(config, plan.devices, plan.precisions, strategy, memory, plan.paced)
    for like in likes:
        for place, one in enumerate(calibrations.known_devices(plan, like)):
            if one is None or known.sources[place] == MEASURED:
                continue
            devices, sources = list(known.devices), list(known.sources)
            devices[place], sources[place] = one, MEASURED
            known = replace(known, devices=tuple(devices), sources=tuple(sources))
    if MEASURED in known.sources and not known.exchange.buckets:
        # Of devices that were measured, but not together as they are now: what they exchange is not free.
        known = replace(known, exchange=exchange_of(config, strategy, memory, plan.paced))
    return known


def like_ddp(spec: RunSpec) -> RunSpec:
    """Return the run with DDP as its option has it; the run itself if DDP is its strategy."""
    ddp = group_options("strategy", only=[MEASURES]).get(MEASURES)
    if ddp is None or ddp["_target_"] == spec.config.strategy["_target_"]:
        return spec
    return spec.with_values(strategy=ddp)

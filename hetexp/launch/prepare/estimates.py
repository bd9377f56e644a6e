"""Estimates of a plan's devices before they train: kept measurements, else the catalogue's figures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetexp.core.compose.options import group_options
from hetexp.core.plan import Plan
from hetexp.plan import calibrations
from hetexp.plan.device_estimates import MEASURED, DeviceEstimates
from hetexp.plan.run_spec import RunSpec

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory

MEASURES = "ddp"
"""Option of the strategy under which devices are measured for any strategy."""


def estimate_memory(plan: Plan, spec: RunSpec) -> RunMemory:
    """Return the memory estimates of a plan's devices, for which data set and model are built."""
    from hetexp.training.measuring.estimate import RunMemory

    places = range(len(plan.all_devices))
    counts = [plan.batch_size_of(place) for place in places]
    precisions = [plan.precisions[plan.rank_of(place)] for place in places]
    return RunMemory(spec.config, plan.all_devices, counts, precisions, spec.strategy)


def estimate_devices(plan: Plan, spec: RunSpec, memory: RunMemory) -> DeviceEstimates:
    """Return the speed of each device of a plan, and their exchange.

    A device's own work in a pass over the whole model is the same under any strategy. So measurements of the
    same job under DDP count as well: those of all devices together, or else those of each device.

    Args:
        memory: has the run's model and a sample.
    """
    from hetexp.training.measuring.catalogue_curves import exchange_of, known_from_catalogue

    config, strategy = spec.config, spec.strategy
    ddp = with_ddp(spec)
    configs = [config] if ddp is spec else [config, ddp.config]
    for measured_config in configs:
        cached = calibrations.find(plan, measured_config)
        if cached is not None:
            return DeviceEstimates.measured(plan.devices, cached.devices, cached.exchange)
    estimates = known_from_catalogue(config, plan.devices, plan.precisions, strategy, memory, plan.paced)
    for measured_config in configs:
        for place, calibration in enumerate(calibrations.known_devices(plan, measured_config)):
            if calibration is None or estimates.sources[place] == MEASURED:
                continue
            devices, sources = list(estimates.devices), list(estimates.sources)
            devices[place], sources[place] = calibration, MEASURED
            estimates = replace(estimates, devices=tuple(devices), sources=tuple(sources))
    if MEASURED in estimates.sources and not estimates.exchange.buckets:
        # The devices were measured, but not together: without buckets their exchange would be free.
        estimates = replace(estimates, exchange=exchange_of(config, strategy, memory, plan.paced))
    return estimates


def with_ddp(spec: RunSpec) -> RunSpec:
    """Return the run with the option for DDP as its strategy, or the run itself if it has DDP."""
    ddp = group_options("strategy", only=[MEASURES]).get(MEASURES)
    if ddp is None or ddp["_target_"] == spec.config.strategy["_target_"]:
        return spec
    return spec.with_values(strategy=ddp)

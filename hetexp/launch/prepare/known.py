"""What is known of a plan's devices before they train: kept measurements, else the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hetexp.core.compose.options import group_options
from hetexp.core.config import Config
from hetexp.core.instantiate import instantiate
from hetexp.core.plan import Plan
from hetexp.plan import calibrations
from hetexp.plan.known import MEASURED, Known
from hetexp.plan.strategy import Strategy

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory

MEASURES = "ddp"
"""Option of the strategy that devices are measured under, whatever another one would make of them."""


def known_of(plan: Plan, config: Config, built: RunMemory) -> Known:
    """Return what is known of each device of a plan, and what they exchange.

    A device's own work in a pass over the whole model is the same under any strategy: what was measured of
    the same job under DDP counts as well, of all devices together, or else of each by itself.

    Args:
        built: holds the run's model and a sample.
    """
    from hetexp.training.measuring.catalogue_curves import exchange_of, known_from_catalogue

    likes = list(_likes(config))
    for like in likes:
        cached = calibrations.find(plan, like)
        if cached is not None:
            return Known.measured(plan.devices, cached.devices, cached.exchange)
    strategy: Strategy = instantiate(config.strategy)
    known = known_from_catalogue(config, plan.devices, plan.precisions, strategy, built, plan.paced)
    for like in likes:
        for place, one in enumerate(calibrations.known_devices(plan, like)):
            if one is None or known.sources[place] == MEASURED:
                continue
            devices, sources = list(known.devices), list(known.sources)
            devices[place], sources[place] = one, MEASURED
            known = replace(known, devices=tuple(devices), sources=tuple(sources))
    if MEASURED in known.sources and not known.exchange.buckets:
        # Of devices that were measured, but not together as they are now: what they exchange is not free.
        known = replace(known, exchange=exchange_of(config, strategy, built, plan.paced))
    return known


def like_ddp(config: Config) -> Config:
    """Return the configuration with DDP as its option has it, where it has another strategy."""
    ddp = group_options("strategy", only=[MEASURES]).get(MEASURES)
    if ddp is None or ddp["_target_"] == config.strategy["_target_"]:
        return config
    return config.model_copy(update={"strategy": ddp})


def _likes(config: Config) -> Iterator[Config]:
    """Yield the configuration, and the same one with DDP where it has another strategy."""
    yield config
    other = like_ddp(config)
    if other is not config:
        yield other

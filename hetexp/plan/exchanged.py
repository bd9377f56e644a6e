"""What strategies exchange: all gradients in every step as DDP does, the weights now and then, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.core.cost.calibration import Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.hardware.links import links_of, wire_of
from hetexp.plan.strategy import Strategy
from hetexp.strategy.hierarchical_sgd import HierarchicalSGD


def exchange_under(
    strategy: Strategy, exchange: Exchange, plan: Plan, devices: Sequence[DeviceSpec]
) -> Exchange:
    """Return what a step exchanges under a strategy.

    An exchange of the weights every `sync_every` steps hides behind nothing: each step takes its part of it.

    Args:
        exchange: under DDP.
        devices: those of the plan that take part, as links see them.
    """
    if strategy.predicted_as not in ("periodic", "apart"):
        return exchange
    quiet = replace(exchange, buckets=(), other_seconds=0.0)
    if strategy.predicted_as == "apart" or len(devices) < 2:
        return quiet
    num_bytes = sum(size for _, size in exchange.buckets)
    links = links_of(plan, devices, exchange.measured)
    travel = max(links.to_host_seconds(rank, num_bytes) for rank in range(len(devices)))
    wire = wire_of(plan, str(getattr(strategy, "wire", "float32")))  # coded on the host
    coded = links.coded_seconds(num_bytes, num_bytes * wire)
    between = coded if wire != 1.0 else links.exchange_seconds(num_bytes)
    synced = (2 * travel + between) / int(getattr(strategy, "sync_every", 1))
    return replace(quiet, other_seconds=synced + _inside_hosts(strategy, num_bytes, plan, devices))


def _inside_hosts(strategy: Strategy, num_bytes: int, plan: Plan, devices: Sequence[DeviceSpec]) -> float:
    """Return what the slowest host's own sum of a step's gradients takes, behind which nothing hides."""
    if not isinstance(strategy, HierarchicalSGD):
        return 0.0
    longest = 0.0
    for group in strategy.groups_of(devices):
        # They are on one host, whatever the devices' own say where a person has named the groups.
        members = [replace(devices[rank], host=None) for rank in group]
        if len(members) > 1:
            links = links_of(plan, members)
            travel = max(links.to_host_seconds(place, num_bytes) for place in range(len(members)))
            longest = max(longest, 2 * travel + links.exchange_seconds(num_bytes))
    return longest

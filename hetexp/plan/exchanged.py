"""What strategies exchange: all gradients in every step as DDP does, the weights now and then, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetexp.core.calibration import Exchange
from hetexp.core.device import DeviceSpec
from hetexp.hardware.links import build_links
from hetexp.strategy.base import Strategy

WIRE = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25}
"""What travels ÷ float32, by a strategy's `wire`."""


def exchange_under(
    strategy: Strategy, exchange: Exchange, specs: Sequence[DeviceSpec], network: Mapping[str, Any] | None
) -> Exchange:
    """Return what a step exchanges under a strategy.

    An exchange of the weights every `sync_every` steps hides behind nothing: each step takes its part of it.

    Args:
        exchange: under DDP.
        specs: devices that take part, as links see them.
        network: the plan's link between hosts.
    """
    if strategy.predicted_as not in ("periodic", "apart"):
        return exchange
    quiet = replace(exchange, buckets=(), other_seconds=0.0)
    if strategy.predicted_as == "apart" or len(specs) < 2:
        return quiet
    num_bytes = sum(size for _, size in exchange.buckets) * WIRE.get(str(getattr(strategy, "wire", "")), 1.0)
    links = build_links(specs, network, exchange.measured)
    travel = max(links.to_host_seconds(rank, num_bytes) for rank in range(len(specs)))
    whole = 2 * travel + links.exchange_seconds(num_bytes)
    return replace(quiet, other_seconds=whole / int(getattr(strategy, "sync_every", 1)))

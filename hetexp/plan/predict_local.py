"""Rows of strategies whose ranks take optimizer steps of their own: exchanged now and then, or never."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.solver import solve
from hetexp.core.calibration import DeviceCalibration
from hetexp.core.errors import ConfigError
from hetexp.core.split import apportion
from hetexp.hardware.links import build_links
from hetexp.plan.scene import Row, Scene
from hetexp.strategy.base import Strategy

WIRE = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25}
"""What travels ÷ float32, by the strategy's `wire`."""


def periodic(scene: Scene, name: str, strategy: Strategy) -> list[Row]:
    """Return the rows of a strategy that exchanges the weights every `sync_every` steps.

    A step is that of the slowest device, and its part of an exchange, which all wait for.
    """
    every = int(getattr(strategy, "sync_every", 1))
    part = WIRE.get(str(getattr(strategy, "wire", "float32")), 1.0)
    return [_row(scene, name, label, p, strategy, part / every) for label, p in scene.policies.items()]


def apart(scene: Scene, name: str, strategy: Strategy) -> list[Row]:
    """Return the rows of a strategy that exchanges nothing while it trains."""
    return [_row(scene, name, label, p, strategy, 0.0) for label, p in scene.policies.items()]


def _row(
    scene: Scene, name: str, label: str, policy: BalancingPolicy, strategy: Strategy, part: float
) -> Row:
    """Return one policy's row.

    Args:
        part: of an exchange of all weights, what a step takes.
    """
    settles = policy.measures or policy.follows
    try:
        if not settles:
            shares = policy.shares(scene.plan.devices, scene.plan.precisions)
            counts = apportion(scene.total, shares).counts
        elif scene.known.complete:
            counts = solve([device.curve for device in scene.devices], scene.total).counts
        else:
            return Row(name, label, problem=f"{scene.unknown()}: it would be measured first", exact=False)
    except ConfigError as error:
        return Row(name, label, problem=" ".join(error.problems), exact=False)
    except ValueError as error:  # the devices' memory together does not hold the batch
        return Row(name, label, problem=f"{error}", exact=False)
    ranks = tuple(range(len(counts)))
    row = scene.row(name, label, ranks, counts)
    seconds = None
    if scene.known.complete:
        steps = _local_steps(strategy, counts)
        own = [_seconds(d, n, k) for d, n, k in zip(scene.devices, counts, steps, strict=True)]
        seconds = max(own) + scene.known.exchange.data_seconds + part * _exchange_seconds(scene)
    rate = scene.total / seconds if seconds else None
    efficiency = rate / scene.whole if rate is not None and scene.whole else None
    return replace(
        row,
        step_seconds=seconds,
        samples_per_second=rate,
        efficiency=efficiency,
        ceiling=None,
        measures=settles,
        exact=strategy.exact,
    )


def _local_steps(strategy: Strategy, counts: Sequence[int]) -> list[int]:
    """Return the optimizer steps that each rank takes in a step of the global batch."""
    if getattr(strategy, "local_steps", "equal") != "speed":
        return [1] * len(counts)
    smallest = min((count for count in counts if count), default=1)
    size = getattr(strategy, "local_batch_size", None) or smallest
    return [max(1, round(count / size)) for count in counts]


def _seconds(device: DeviceCalibration, samples: int, steps: int) -> float:
    """Return what so many samples take in so many optimizer steps."""
    small, larger = divmod(samples, steps)
    return larger * device.curve.seconds(small + 1) + (steps - larger) * device.curve.seconds(small)


def _exchange_seconds(scene: Scene) -> float:
    """Return what an all-reduce of all weights takes that hides behind nothing."""
    exchange = scene.known.exchange
    num_bytes = sum(size for _, size in exchange.buckets)
    links = build_links(scene.linked.devices, scene.plan.network, exchange.measured)
    if links.world_size < 2:
        return 0.0
    travel = max(links.to_host_seconds(rank, num_bytes) for rank in range(links.world_size))
    return 2 * travel + links.exchange_seconds(num_bytes)

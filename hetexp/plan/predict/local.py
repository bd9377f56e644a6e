"""Rows of strategies whose ranks take optimizer steps of their own: exchanged now and then, or never."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.errors import ConfigError
from hetexp.core.split import apportion
from hetexp.plan.exchanged import exchange_under
from hetexp.plan.measured import choose
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.strategy import Strategy
from hetexp.strategy.hierarchical_sgd import HierarchicalSGD


def local(inputs: PredictionInputs, name: str, strategy: Strategy) -> list[PredictedRun]:
    """Return the row of each policy; a step is that of the slowest device, and its part of an exchange."""
    rows = [_row(inputs, name, label, policy, strategy) for label, policy in inputs.policies.items()]
    best = [row.efficiency for row in rows if row.efficiency is not None and row.measures]
    return [replace(row.reaching(max(best, default=None)), exact=strategy.exact) for row in rows]


def _row(
    inputs: PredictionInputs, name: str, label: str, policy: BalancingPolicy, strategy: Strategy
) -> PredictedRun:
    settles = policy.measures or policy.follows
    exchange = exchange_under(strategy, inputs.known.exchange, inputs.plan, inputs.linked.devices)
    reasons: tuple[str, ...] = ()
    try:
        if not settles:
            shares = policy.shares(inputs.plan.devices, inputs.plan.precisions)
            ranks, counts = tuple(range(len(shares))), apportion(inputs.total, shares).counts
        elif inputs.known.complete:
            drops = policy.measures and policy.drop_slower and not isinstance(strategy, HierarchicalSGD)
            choice = choose(inputs.linked, inputs.devices, exchange, drops)
            ranks, counts, reasons = choice.ranks, choice.split.counts, choice.reasons[:-1]
        else:
            return PredictedRun(name, label, problem=f"{inputs.unknown()}: it would be measured first")
    except ConfigError as error:
        return PredictedRun(name, label, problem=" ".join(error.problems))
    except ValueError as error:  # the devices' memory together does not hold the batch
        return PredictedRun(name, label, problem=f"{error}")
    row = inputs.row(name, label, ranks, counts)
    seconds = None
    if inputs.known.complete:
        devices = [inputs.devices[rank] for rank in ranks]
        steps = _local_steps(strategy, counts)
        own = [_seconds(d, n, k) for d, n, k in zip(devices, counts, steps, strict=True)]
        seconds = max(own) + exchange.data_seconds + (exchange.other_seconds if len(ranks) > 1 else 0.0)
    rate = inputs.total / seconds if seconds else None
    return replace(
        row,
        step_seconds=seconds,
        samples_per_second=rate,
        efficiency=rate / inputs.whole if rate is not None and inputs.whole else None,
        reasons=reasons,
        measures=settles,
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

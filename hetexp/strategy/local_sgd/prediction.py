"""Predictions of strategies whose ranks take local steps and exchange weights now and then, or never."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.hardware.links import links_of, wire_of
from hetexp.plan.calibrated_plan import choose
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.strategy import Strategy


def without_gradients(exchange: Exchange) -> Exchange:
    """Return the exchange of a step under DDP without its gradients."""
    return replace(exchange, buckets=(), other_seconds=0.0)


def sync_seconds(
    exchange: Exchange, plan: Plan, devices: Sequence[DeviceSpec], wire: str = "float32"
) -> float:
    """Return the time of an average of the weights over these devices, which no compute overlaps.

    Args:
        exchange: of a step under DDP, whose gradients are as large as the weights.
        devices: with the facts of their links.
        wire: compression of the weights' change, on the host.
    """
    num_bytes = sum(size for _, size in exchange.buckets)
    links = links_of(plan, devices, exchange.measured)
    travel = max(links.to_host_seconds(rank, num_bytes) for rank in range(len(devices)))
    ratio = wire_of(plan, wire)
    coded = links.coded_seconds(num_bytes, num_bytes * ratio)
    return 2 * travel + (coded if ratio != 1.0 else links.exchange_seconds(num_bytes))


def rows_of(
    inputs: PredictionInputs, strategy: Strategy, local_steps: Callable[[Sequence[int]], list[int]]
) -> list[PredictedRun]:
    """Return the row of each policy; a step takes as long as the slowest device, and its part of an exchange.

    Args:
        local_steps: samples of each rank → number of its optimizer steps.
    """
    rows = [_row(inputs, label, policy, strategy, local_steps) for label, policy in inputs.policies.items()]
    best = [row.efficiency for row in rows if row.efficiency is not None and row.measures]
    return [row.reaching(max(best, default=None)) for row in rows]


def _row(
    inputs: PredictionInputs,
    label: str,
    policy: BalancingPolicy,
    strategy: Strategy,
    local_steps: Callable[[Sequence[int]], list[int]],
) -> PredictedRun:
    settles = policy.measures or policy.follows
    exchange = strategy.step_exchange(inputs.estimates.exchange, inputs.plan, inputs.linked.devices)
    reasons: tuple[str, ...] = ()
    try:
        if not settles:
            shares = policy.shares(inputs.plan.devices, inputs.plan.precisions)
            ranks, counts = tuple(range(len(shares))), apportion(inputs.total, shares).counts
        elif inputs.estimates.complete:
            drops = policy.measures and strategy.may_leave_out(policy)
            choice = choose(inputs.linked, inputs.devices, exchange, drops)
            ranks, counts, reasons = choice.ranks, choice.split.counts, choice.reasons[:-1]
        else:
            return PredictedRun(label, problem=f"{inputs.unknown()}: it would be measured first")
    except ConfigError as error:
        return PredictedRun(label, problem=" ".join(error.problems))
    except ValueError as error:  # the devices' memory together does not hold the batch
        return PredictedRun(label, problem=f"{error}")
    row = inputs.row(label, ranks, counts)
    seconds = None
    if inputs.estimates.complete:
        devices = [inputs.devices[rank] for rank in ranks]
        steps = local_steps(counts)
        slowest = max(_seconds(d, n, k) for d, n, k in zip(devices, counts, steps, strict=True))
        seconds = slowest + exchange.data_seconds + (exchange.other_seconds if len(ranks) > 1 else 0.0)
    return replace(inputs.timed(row, seconds), reasons=reasons, measures=settles)


def _seconds(device: DeviceCalibration, samples: int, steps: int) -> float:
    """Return the time of `samples` in `steps` optimizer steps."""
    small, larger = divmod(samples, steps)
    return larger * device.curve.seconds(small + 1) + (steps - larger) * device.curve.seconds(small)

"""From a plan as configured to the one that is launched: what measuring and memory make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hetexp.core.config import Config
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.instantiate import instantiate
from hetexp.core.plan import Plan
from hetexp.launch.launcher import measure
from hetexp.launch.prepare.stages import with_stages
from hetexp.plan import calibrations
from hetexp.plan.exchanged import exchange_under
from hetexp.plan.measured import Choice, begun_with, choose, replanned
from hetexp.plan.planner import in_one_process
from hetexp.strategy.hierarchical_sgd import HierarchicalSGD

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory

Measure = Callable[[Plan, Config, Console], dict[str, Any]]


def prepare(plan: Plan, config: Config, console: Console, measure_by: Measure | None = None) -> Plan:
    """Return the plan that is launched.

    Args:
        measure_by: lets the plan's ranks measure their devices; `None`: the launcher does.

    Raises:
        ConfigError: a device has less memory than it needs, or the model cannot be cut so.
        SetupError, RunFailedError: measuring the devices could not be started, or failed.
    """
    strategy = instantiate(config.strategy)
    if strategy.steps == "staged":  # no device has the whole model for its own samples
        return with_stages(plan, config)
    plan = in_one_process(plan, strategy)
    memory = memory_of(plan, config)
    return with_memory(with_measured_split(plan, config, memory, console, measure_by), memory)


def with_measured_split(
    plan: Plan, config: Config, memory: RunMemory | None, console: Console, measure_by: Measure | None = None
) -> Plan:
    """Return the plan with the split that measures best, where the policy asks for it and there is a choice.

    Devices that were measured for the same job before are not measured again. The split is chosen again each
    time: the batch, the memory or the policy may ask for another one. A policy that follows the devices
    begins with whatever is known of them.

    Args:
        memory: limits the devices' passes, and caps their shares.
        measure_by: as of `prepare`.
    """
    policy = instantiate(config.balancing)
    if not (policy.measures or policy.follows) or plan.world_size < 2:
        return plan
    cached = calibrations.find(plan, config) if not policy.recalibrate else None
    if cached is None and (not policy.measures or config.trainer.fast_dev_run):
        known = [] if policy.recalibrate else calibrations.known_devices(plan, config)
        return begun_with(plan, known, _limits(plan, config, memory)[0]) if known else plan
    if cached is None:
        result = (measure_by or measure)(plan, config, console)
        own, exchange = [DeviceCalibration.from_dict(one) for one in result["devices"]], result["exchange"]
        measured_at = calibrations.store(plan, config, result)
    else:
        own, exchange, measured_at = list(cached.devices), cached.exchange.to_dict(), cached.measured_at
        plan = replace(plan, reasons=(cached.reason(), *plan.reasons))
    devices, choice = best_split(plan, config, memory, own, Exchange.from_dict(exchange))
    entries = calibrations.names(plan, config)
    source = {"measured_at": measured_at, "cached": cached is not None, "entries": entries}
    return replanned(plan, devices, exchange, choice, source)


def best_split(
    plan: Plan,
    config: Config,
    memory: RunMemory | None,
    own: Sequence[DeviceCalibration],
    exchange: Exchange,
) -> tuple[list[DeviceCalibration], Choice]:
    """Return the devices within their memory, and the split over them that ends a step soonest.

    Args:
        own: what each device of the plan does by itself.
        exchange: of gradients, as under DDP.

    Raises:
        ConfigError: the devices' memory together does not hold the batch.
    """
    strategy, policy = instantiate(config.strategy), instantiate(config.balancing)
    caps, passes = _limits(plan, config, memory)
    limits = zip(own, caps, passes, strict=True)
    devices = [device.capped(cap).split_microbatches(size or None) for device, cap, size in limits]
    seen = exchange_under(strategy, exchange, plan, plan.devices)
    try:
        # Whose hosts take part is what the strategy is about.
        drops = policy.drop_slower and not isinstance(strategy, HierarchicalSGD)
        return devices, choose(plan, devices, seen, drops)
    except ValueError as error:
        raise ConfigError(
            must_be(
                "trainer.global_batch_size",
                "what the devices' memory holds",
                config.trainer.global_batch_size,
                f"{error}. A smaller trainer.microbatch_size needs less.",
            )
        ) from error


def _limits(
    plan: Plan, config: Config, memory: RunMemory | None
) -> tuple[Sequence[int | None], Sequence[int | None]]:
    """Return the most samples that each device may get of a step, and in one pass (0: not even one)."""
    if memory is None:
        return [None] * plan.world_size, [None] * plan.world_size
    return memory.caps(), memory.largest_passes([config.trainer.global_batch_size] * plan.world_size)


def memory_of(plan: Plan, config: Config) -> RunMemory | None:
    """Return the estimates of a plan's ranks; none if only the CPU trains, or if they are not wanted.

    Where only the CPU trains they take longer than a first small run does. The data set is built for them:
    `hardware.check_memory=false` does without.
    """
    if not config.hardware.check_memory or all(device.backend == "cpu" for device in plan.devices):
        return None
    from hetexp.training.measuring.estimate import RunMemory

    strategy = instantiate(config.strategy)
    if plan.cards:
        precisions = plan.precisions * len(plan.cards)
        return RunMemory(config, plan.cards, plan.card_batch_sizes, precisions, strategy)
    return RunMemory(config, plan.devices, plan.local_batch_sizes, plan.precisions, strategy)


def with_memory(plan: Plan, memory: RunMemory | None) -> Plan:
    """Return the plan with what each of its devices will hold.

    Raises:
        ConfigError: a device has less memory than it needs.
    """
    if memory is None:
        return plan
    if plan.cards:
        return _with_memory_of_cards(plan, memory)
    counts = list(plan.local_batch_sizes)
    if instantiate(plan.config["balancing"]).follows:  # any device may get any part of the batch
        counts = [sum(counts)] * plan.world_size
    plan = with_microbatches(plan, memory.of(plan.devices, plan.local_batch_sizes, plan.precisions), counts)
    memory = memory.of(plan.devices, plan.local_batch_sizes, plan.precisions, plan.microbatch_sizes)
    problems = memory.problems()
    if problems:
        raise ConfigError(problems)
    needs = tuple(one.total_bytes if one is not None else None for one in memory.estimates)
    unknown = [f"The memory that it needs is not known: {memory.reason}."] if memory.reason else []
    return replace(plan, memory_bytes=needs, reasons=(*plan.reasons, *unknown))


def _with_memory_of_cards(plan: Plan, memory: RunMemory) -> Plan:
    """The cards of one process: their passes are chunks of its own, and are cut no further."""
    problems = memory.problems()
    if problems:
        raise ConfigError(problems)
    needs = [one.total_bytes for one in memory.estimates if one is not None]
    unknown = [f"The memory that it needs is not known: {memory.reason}."] if memory.reason else []
    return replace(plan, memory_bytes=(max(needs, default=None),), reasons=(*plan.reasons, *unknown))


def with_microbatches(plan: Plan, memory: RunMemory, counts: Sequence[int]) -> Plan:
    """Return the plan with several passes a step for each device that does not hold its samples in one.

    Args:
        memory: of the plan's devices.
        counts: the most samples that each of them may get.
    """
    largest = memory.largest_passes(counts)
    before = plan.microbatch_sizes or (None,) * plan.world_size
    # 0 stands for a device that holds not even one sample: that is reported as a problem.
    limits = [[n for n in pair if n] for pair in zip(before, largest, strict=True)]
    sizes = [min(pair, default=None) for pair in limits]
    reasons = [
        f"{device} takes its {samples} samples of a step in passes of at most {size}: its memory does not "
        "hold more."
        for device, samples, size in zip(plan.devices, plan.local_batch_sizes, sizes, strict=True)
        if size is not None and size < samples and plan.config["trainer"]["microbatch_size"] is None
    ]
    return replace(plan, microbatch_sizes=tuple(sizes), reasons=(*plan.reasons, *reasons))

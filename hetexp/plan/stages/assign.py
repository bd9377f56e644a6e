"""Assigns stages of the model and samples to a plan's devices, with the reasons.

If the policy measures or follows the devices, their speeds are the estimates. Otherwise they are the policy's
shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.cost.step import Channel
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.stage import Layer, Stage
from hetexp.hardware.links import HOST_EXCHANGE, build_links, links_of, wire_of
from hetexp.hardware.memory.rules import rules_for
from hetexp.plan.calibrated_plan import LEAST_GAIN, fastest_first
from hetexp.plan.device_estimates import MEASURED, DeviceEstimates
from hetexp.plan.stages.groups import Exchange, Grouping, choose_groups
from hetexp.plan.stages.pipelines import Cut, Pipeline, StageDevice
from hetexp.plan.stages.search import choose_stages, even_cut

LEAST_SHARE = 1e-3
"""Smallest share of a device, as a fraction of the largest, because every stage has work."""


class ScheduleFacts(Protocol):
    """The facts of a strategy's schedule."""

    @property
    def name(self) -> str: ...
    @property
    def stages_a_rank(self) -> int: ...
    @property
    def returns(self) -> bool: ...


class StagedStrategy(Protocol):
    """A strategy that cuts the model into stages."""

    @property
    def schedule(self) -> ScheduleFacts: ...

    def num_microbatches(self, num_stages: int, num_ranks: int, num_samples: int) -> int:
        """Return the microbatches of a step of one pipeline."""

    def groups_on(self, devices: Sequence[DeviceSpec]) -> list[list[int]] | None:
        """Return the ranks of each pipeline, in the order of its stages; `None`: the planner's choice."""

    def ranges_in(self, layers: Sequence[str]) -> Sequence[Sequence[Sequence[int]]] | None:
        """Return the layers of each pipeline's stages; `None`: the planner's choice.

        Args:
            layers: the names of the model's layers.
        """


@dataclass(frozen=True)
class StageAssignment:
    """The layers and samples of each device."""

    ranks: tuple[int, ...]
    """Devices of the plan that take part, in the order of their new ranks."""
    stages: tuple[tuple[Stage, ...], ...]
    """Stages of each rank, in the order of its pipeline."""
    replica_batch_sizes: tuple[int, ...]
    """Samples of a full global batch for each pipeline."""
    shares: tuple[float, ...]
    """Each rank's part of a step's work."""
    memory_bytes: tuple[int, ...]
    """Each rank's need: weights, gradients, optimizer state, activations, and the overhead of its torch."""
    step_seconds: float | None
    """Predicted step; `None` if the devices' speeds are not known."""
    bubble: float | None
    """Predicted fraction of the devices' time in which nothing is computed."""
    busy_seconds: tuple[float | None, ...]
    """Each rank's predicted own work in a step."""
    reasons: tuple[str, ...]

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """Return the samples that pass through each rank: those of its pipeline."""
        return tuple(self.replica_batch_sizes[stages[0].replica] for stages in self.stages)


def assign_stages(
    plan: Plan,
    strategy: StagedStrategy,
    policy: BalancingPolicy,
    layers: Sequence[Layer],
    estimates: DeviceEstimates | None,
    check_memory: bool = True,
) -> StageAssignment:
    """Return the stages of a plan's devices.

    Args:
        known: of each device of the plan; `None` if it was not asked for.
        check_memory: whether a stage must fit its device.

    Raises:
        ConfigError: nothing fits the devices' memory, the model has too few layers, or the policy does not
            fit the devices.
    """
    rated = estimates if estimates is not None and estimates.complete else None
    by_curve = rated is not None and (policy.measures or policy.follows)
    shares = None if by_curve else policy.shares(plan.devices, plan.precisions)
    limits = [_usable_bytes(device) if check_memory else None for device in plan.devices]
    pipeline = Pipeline(
        _as_sent(plan, layers),
        _devices(plan, rated if by_curve else None, shares, limits),
        strategy.schedule.name,
        strategy.num_microbatches,
        strategy.schedule.stages_a_rank,
        strategy.schedule.returns,
    )
    if by_curve:
        pipeline = replace(pipeline, send=_sends(plan), link=_links(rated))
    given, ranges = strategy.groups_on(plan.devices), strategy.ranges_in([layer.name for layer in layers])
    longest = max(len(group) for group in given) if given is not None else 1
    if pipeline.num_stages(longest) > len(layers):
        raise ConfigError(
            f"`model` must have at least {pipeline.num_stages(longest)} layers for as many stages on "
            f"{longest} devices, but has {len(layers)} instead. Use fewer devices, or strategy=ddp."
        )
    exchange = _exchanges(plan, rated, layers) if by_curve else (lambda cuts: 0.0)
    total: int = plan.config["trainer"]["global_batch_size"]
    drop_slower = by_curve and policy.measures and policy.drop_slower
    try:
        found = _choose(pipeline, total, exchange, given, ranges, drop_slower)
    except ValueError as error:
        raise ConfigError(
            f"`model` must be one that the devices hold in stages, but {error}. More devices, more "
            "microbatches (strategy.num_microbatches) or an optimizer with less state need less of each."
        ) from error
    judged = found
    if rated is not None and not by_curve:
        known_devices = _devices(plan, rated, None, limits)
        own = replace(pipeline, devices=known_devices, send=_sends(plan), link=_links(rated))
        cuts = tuple(own.judge(cut.group, cut.ends, cut.samples) for cut in found.cuts)
        spent = max(cut.step.step_seconds for cut in cuts) + _exchanges(plan, rated, layers)(cuts)
        judged = Grouping(cuts, spent)
    arrangement = _as_ranks(plan, pipeline, judged, rated is not None)
    why = _why(plan, policy, pipeline, judged, rated, by_curve)
    return replace(arrangement, reasons=(*_described(plan, strategy, pipeline, judged), *why))


def _as_sent(plan: Plan, layers: Sequence[Layer]) -> Sequence[Layer]:
    """Return the layers with the compressed size of their outputs between stages."""
    ratio = wire_of(plan, plan.boundary_wire)
    if ratio == 1.0:
        return layers
    return [replace(layer, output_bytes=math.ceil(layer.output_bytes * ratio)) for layer in layers]


def _choose(
    pipeline: Pipeline,
    total: int,
    exchange: Exchange,
    given: Sequence[Sequence[int]] | None,
    ranges: Sequence[Sequence[Sequence[int]]] | None,
    drop_slower: bool,
) -> Grouping:
    """Return groups, cuts and samples, except those that are given."""
    devices = range(len(pipeline.devices))
    if ranges is not None and given is not None:
        ends = {tuple(group): tuple(e for _, e in own) for group, own in zip(given, ranges, strict=True)}
        return choose_groups(pipeline, devices, total, exchange, given, ends=ends)
    if given is not None and len(given) > 1:
        return choose_groups(pipeline, devices, total, exchange, given)
    if given is None:
        return choose_groups(pipeline, devices, total, exchange, fewest=2)
    sets: list[tuple[int, ...]] = [tuple(given[0])]
    if drop_slower:
        ordered = fastest_first([device.calibration for device in pipeline.devices], total)
        sets = [tuple(sorted(ordered[:count])) for count in range(2, len(ordered))] + sets
    best: Cut | None = None
    for chosen in sets:
        try:
            cut = choose_stages(pipeline, chosen, total)
        except ValueError:
            if chosen == sets[-1] and best is None:
                raise
            continue
        if best is None or cut.step.step_seconds < best.step.step_seconds * (1 - LEAST_GAIN):
            best = cut
    assert best is not None
    return Grouping((best,), best.step.step_seconds)


def _devices(
    plan: Plan,
    estimates: DeviceEstimates | None,
    shares: Sequence[float] | None,
    limits: Sequence[int | None],
) -> list[StageDevice]:
    if estimates is None:
        assert shares is not None
        least = max(shares) * LEAST_SHARE
        pairs = zip(plan.devices, shares, limits, strict=True)
        return [StageDevice.of_share(max(share, least), limit, str(d)) for d, share, limit in pairs]
    devices = []
    rows = zip(plan.devices, estimates.devices, estimates.sources, limits, strict=True)
    for device, calibration, source, limit in rows:
        assert calibration is not None
        # An emulated card, and the catalogue's model of a real one, have their overhead in every pass.
        real = source == MEASURED and device.backend != "emulated"
        devices.append(StageDevice(calibration, limit, real, str(device)))
    return devices


def _usable_bytes(device: DeviceSpec) -> int | None:
    """Return a device's memory for tensors; `None`: not known."""
    if device.memory_bytes is None:
        return None
    rules = rules_for(device)
    return int((device.memory_bytes - rules.context_bytes - rules.workspace_bytes) / rules.fragmentation)


def _sends(plan: Plan) -> Callable[[int, int, float], float]:
    """Return a function for the seconds of a message from host to host, by gloo for all vendors.

    Between emulated cards only a network between hosts takes time.
    """

    @cache
    def between(sender: int, receiver: int) -> list[Channel]:
        pair = [plan.devices[sender], plan.devices[receiver]]
        channels = list(build_links(pair, plan.network).exchange[1:])  # the network, between several hosts
        if any(device.backend != "emulated" for device in pair):
            channels.append(HOST_EXCHANGE)
        return channels

    def seconds(sender: int, receiver: int, num_bytes: float) -> float:
        return sum((channel.seconds(num_bytes) for channel in between(sender, receiver)), 0.0)

    return seconds


def _links(estimates: DeviceEstimates | None) -> Callable[[int], Channel]:
    """Return a function for each device's link to its host; a device that the catalogue lacks has no cost."""
    assert estimates is not None
    own = [build_links([device]).device[0] for device in estimates.linked]
    return lambda device: own[device]


def _exchanges(plan: Plan, estimates: DeviceEstimates | None, layers: Sequence[Layer]) -> Exchange:
    """Return a function for the seconds in which pipelines sum their gradients, after all have them.

    Each set of ranks with the same layers has a ring, and a rank does its rings one after another.
    """
    linked = estimates.linked if estimates is not None else plan.devices
    measured = estimates.exchange.measured if estimates is not None else None
    rings: dict[tuple[int, ...], tuple[float, float]] = {}

    def ring(devices: tuple[int, ...], num_bytes: int) -> float:
        if devices not in rings:
            links = links_of(plan, [linked[device] for device in devices], measured)

            def seconds(size: int) -> float:
                travel = max(links.to_host_seconds(place, size) for place in range(len(devices)))
                return 2 * travel + links.bucket_seconds(size)

            rings[devices] = seconds(0), (seconds(2**20) - seconds(0)) / 2**20
        latency, a_byte = rings[devices]
        return latency + a_byte * num_bytes

    def exchange(cuts: Sequence[Cut]) -> float:
        if len(cuts) < 2:
            return 0.0
        holders: dict[tuple[int, ...], int] = {}
        for number, layer in enumerate(layers):
            own = (
                next(d for d, (_, end) in zip(c.devices, c.bounds, strict=True) if number < end) for c in cuts
            )
            key = tuple(sorted(own))
            holders[key] = holders.get(key, 0) + layer.trained_bytes
        clocks: dict[int, float] = {}
        for devices, num_bytes in sorted(holders.items()):
            end = max(clocks.get(device, 0.0) for device in devices) + ring(devices, num_bytes)
            clocks.update(dict.fromkeys(devices, end))
        return max(clocks.values())

    return exchange


def _as_ranks(plan: Plan, pipeline: Pipeline, grouping: Grouping, rated: bool) -> StageAssignment:
    """Return the assignment by ranks; devices keep their order if that of each pipeline allows it."""
    ranks = [device for cut in grouping.cuts for device in cut.group]
    if all(list(cut.group) == sorted(cut.group) for cut in grouping.cuts):
        ranks.sort()
    stages: dict[int, list[Stage]] = {device: [] for device in ranks}
    shares, memory = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0)
    busy: dict[int, float | None] = dict.fromkeys(ranks)
    total = sum(grouping.batch_sizes)
    for replica, cut in enumerate(grouping.cuts):
        for index, (device, (first, end)) in enumerate(zip(cut.devices, cut.bounds, strict=True)):
            stages[device].append(Stage(replica, index, first, end))
            shares[device] += pipeline.of("work", first, end) * cut.samples / total
        if rated:
            busy.update(zip(cut.group, cut.step.busy_seconds, strict=True))
        for device, need in zip(cut.group, cut.memory_bytes, strict=True):
            rules = rules_for(plan.devices[device])
            memory[device] = int(need * rules.fragmentation) + rules.context_bytes + rules.workspace_bytes
    return StageAssignment(
        ranks=tuple(ranks),
        stages=tuple(tuple(stages[device]) for device in ranks),
        replica_batch_sizes=grouping.batch_sizes,
        shares=tuple(shares[device] for device in ranks),
        memory_bytes=tuple(memory[device] for device in ranks),
        step_seconds=grouping.step_seconds if rated else None,
        bubble=grouping.bubble if rated else None,
        busy_seconds=tuple(busy[device] for device in ranks),
        reasons=(),
    )


def _described(plan: Plan, strategy: StagedStrategy, pipeline: Pipeline, grouping: Grouping) -> list[str]:
    """Return a sentence about each pipeline."""
    sentences = []
    for number, cut in enumerate(grouping.cuts):
        pairs = zip(cut.devices, cut.bounds, strict=True)
        where = ", ".join(f"{layer_range(*bounds)} on {plan.devices[device].id}" for device, bounds in pairs)
        name = "The pipeline" if len(grouping.cuts) == 1 else f"Pipeline {number}"
        many = len(pipeline.sizes(len(cut.group), cut.samples))
        sentences.append(
            f"{name} takes {cut.samples} samples a step in {many} microbatches "
            f"({strategy.schedule.name}): {where}."
        )
    return sentences


def _why(
    plan: Plan,
    policy: BalancingPolicy,
    pipeline: Pipeline,
    grouping: Grouping,
    rated: DeviceEstimates | None,
    by_curve: bool,
) -> list[str]:
    """Return the reasons: the policy, the prediction, and the devices that are left out."""
    if not by_curve:
        wants = policy.measures or policy.follows
        why = ", as nothing is known of the devices' speeds" if wants else ""
        reasons = [f"The layers follow the shares of policy {type(policy).__name__.lower()}{why}."]
        return reasons if rated is None else [*reasons, _predicted(grouping)]
    assert rated is not None
    source = " and ".join(dict.fromkeys(rated.sources))
    even = [even_cut(pipeline, cut.group, cut.samples).step.step_seconds for cut in grouping.cuts]
    exchange = grouping.step_seconds - max(cut.step.step_seconds for cut in grouping.cuts)
    reasons = [
        f"{_predicted(grouping)[:-1]}; with as many layers in each stage, {max(even) + exchange:.4g} s "
        f"(speeds: {source})."
    ]
    left = set(range(plan.world_size)) - {device for cut in grouping.cuts for device in cut.group}
    whom = ", ".join(str(plan.devices[device]) for device in sorted(left))
    return [*reasons, f"Without {whom} a step is as short or shorter."] if left else reasons


def _predicted(grouping: Grouping) -> str:
    return f"A step is predicted to take {grouping.step_seconds:.4g} s, {grouping.bubble:.1%} of it waiting."


def layer_range(first: int, end: int) -> str:
    """Return a stage's layers as text: `layer 3`, `layers 0–2`."""
    return f"layer {first}" if end - first == 1 else f"layers {first}–{end - 1}"

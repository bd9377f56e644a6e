"""From a plan as configured to the plan that is launched: stages or samples, as the strategy wants it.

The devices are measured, or their memory estimated, as far as the split depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.plan import Plan
from hetexp.core.stage import Layer
from hetexp.launch.prepare.known import known_of, memory_of
from hetexp.plan import calibrations
from hetexp.plan.known import MEASURED
from hetexp.plan.measured import Choice, begun_with, choose, replanned
from hetexp.plan.routes import routed
from hetexp.plan.run_spec import RunSpec
from hetexp.plan.stages.arrange import Arrangement, CutsModels, arrange

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory

Measure = Callable[[Plan, RunSpec], dict[str, Any]]
"""Lets the ranks of a plan measure their devices, as `hetexp.launch.launcher.measure`."""


def prepare(plan: Plan, spec: RunSpec, measure: Measure) -> Plan:
    """Return the plan that is launched.

    Raises:
        ConfigError: a device has less memory than it needs, or the model cannot be cut so.
        SetupError, RunFailedError: measuring the devices could not be started, or failed.
    """
    return spec.strategy.prepare(plan, Preparation(spec, measure))


class Preparation:
    """Makes the plan of a run final.

    Args:
        measure: `None` starts nothing: the plan then follows what is known, and `remarks` say so.
    """

    def __init__(self, spec: RunSpec, measure: Measure | None = None) -> None:
        self._spec, self._measure = spec, measure
        self.remarks: list[str] = []
        """What the plan would follow beside what is known."""

    def stages(self, plan: Plan, cuts: CutsModels) -> Plan:
        """Return the plan with each rank's stages.

        A rank's share is then its part of a step's work, and its samples are those of its pipeline.

        Raises:
            ConfigError: the model may not be cut, or its stages do not fit the devices.
        """
        spec, policy = self._spec, self._spec.policy
        memory = memory_of(plan, spec)
        layers = layers_of(plan, spec, memory)
        known = known_of(plan, spec, memory) if policy.measures or policy.follows else None
        check_memory = spec.config.hardware.check_memory
        return with_arrangement(plan, arrange(plan, cuts, policy, layers, known, check_memory))

    def samples(self, plan: Plan) -> Plan:
        """Return the plan with each rank's samples, and the passes and memory that they need.

        Raises:
            ConfigError: a device has less memory than it needs.
        """
        memory = self.memory(plan)
        return with_memory(self.split(plan, memory), self._spec, memory)

    def memory(self, plan: Plan) -> RunMemory | None:
        """Return the estimates of a plan's devices; `None` if only the CPU trains, or if they are not wanted.

        If only the CPU trains they take longer than a first small run does. The data set is built for them:
        `hardware.check_memory=false` does without.
        """
        cpu = all(device.backend == "cpu" for device in plan.devices)
        return None if cpu or not self._spec.config.hardware.check_memory else memory_of(plan, self._spec)

    def split(self, plan: Plan, memory: RunMemory | None) -> Plan:
        """Return the plan with the split that measures best, if the policy asks for it and there is a choice.

        Devices that were measured for the same job before are not measured again. The split is chosen again
        each time: the batch, the memory or the policy may ask for another one. A policy that follows the
        devices begins with whatever is known of them.

        Args:
            memory: limits the devices' passes, and caps their shares.
        """
        config, policy = self._spec.config, self._spec.policy
        if not (policy.measures or policy.follows) or plan.world_size < 2:
            return plan
        cached = calibrations.find(plan, config) if not policy.recalibrate else None
        if cached is None and (not policy.measures or config.trainer.fast_dev_run):
            known = [] if policy.recalibrate else calibrations.known_devices(plan, config)
            return begun_with(plan, known, self._limits(plan, memory)[0]) if known else plan
        if cached is None and self._measure is None:
            return self._before_measuring(plan, memory)
        if cached is None:
            assert self._measure is not None
            result = self._measure(plan, self._spec)
            own = [DeviceCalibration.from_dict(one) for one in result["devices"]]
            exchange = result["exchange"]
            measured_at = calibrations.store(plan, config, result)
        else:
            own, exchange, measured_at = list(cached.devices), cached.exchange.to_dict(), cached.measured_at
            plan = replace(plan, reasons=(cached.reason(), *plan.reasons))
        devices, choice = self._best_split(plan, memory, own, Exchange.from_dict(exchange))
        entries = calibrations.names(plan, config)
        source = {"measured_at": measured_at, "cached": cached is not None, "entries": entries}
        return replanned(plan, devices, exchange, choice, source)

    def _before_measuring(self, plan: Plan, memory: RunMemory | None) -> Plan:
        """Return the plan with the best split that is known of, and remark what is not."""
        name = self._spec.request.choices.get("balancing", type(self._spec.policy).__name__.lower())
        first = f"A run measures its devices first (balancing={name})"
        known = known_of(plan, self._spec, memory or memory_of(plan, self._spec))
        own = [one for one in known.devices if one is not None]
        if len(own) < plan.world_size:
            pairs = zip(plan.devices, known.devices, strict=True)
            names = ", ".join(device.id for device, one in pairs if one is None)
            self.remarks.append(f"{first}; this split is where it begins, as nothing is known of {names}.")
            return plan
        devices, choice = self._best_split(plan, memory, own, known.exchange)
        source = " and ".join(dict.fromkeys(known.sources))
        if set(known.sources) == {MEASURED}:
            source = "measured before for another batch or strategy"
        self.remarks.append(f"{first}; this split and step are by figures {source}.")
        return replanned(plan, devices, known.exchange.to_dict(), choice)

    def _best_split(
        self, plan: Plan, memory: RunMemory | None, own: Sequence[DeviceCalibration], exchange: Exchange
    ) -> tuple[list[DeviceCalibration], Choice]:
        """Return the devices within their memory, and the split over them that ends a step soonest.

        Args:
            own: what each device of the plan does by itself.
            exchange: of gradients, as under DDP.

        Raises:
            ConfigError: the devices' memory together does not hold the batch.
        """
        strategy, policy = self._spec.strategy, self._spec.policy
        caps, passes = self._limits(plan, memory)
        limits = zip(own, caps, passes, strict=True)
        devices = [device.capped(cap).split_microbatches(size or None) for device, cap, size in limits]
        seen = strategy.step_exchange(exchange, plan, plan.devices)
        try:
            return devices, choose(plan, devices, seen, strategy.may_leave_out(policy))
        except ValueError as error:
            raise ConfigError(
                must_be(
                    "trainer.global_batch_size",
                    "what the devices' memory holds",
                    self._spec.config.trainer.global_batch_size,
                    f"{error}. A smaller trainer.microbatch_size needs less.",
                )
            ) from error

    def _limits(
        self, plan: Plan, memory: RunMemory | None
    ) -> tuple[Sequence[int | None], Sequence[int | None]]:
        """Return the most samples that each device may get of a step, and in one pass (0: not even one)."""
        if memory is None:
            return [None] * plan.world_size, [None] * plan.world_size
        whole = [self._spec.config.trainer.global_batch_size] * plan.world_size
        return memory.caps(), memory.largest_passes(whole)


def layers_of(plan: Plan, spec: RunSpec, memory: RunMemory) -> tuple[Layer, ...]:
    """Return the layers of the run's model, in the precision that most ranks compute in.

    Raises:
        ConfigError: the model may not be cut.
    """
    from hetexp.training.measuring.layers import describe_layers

    ((precision, _),) = Counter(plan.precisions or ["float32"]).most_common(1)
    return describe_layers(spec.config, memory, precision, emulated=plan.paced)


def with_arrangement(plan: Plan, found: Arrangement) -> Plan:
    """Return the plan of the devices that take part, in the order of their ranks, with their stages."""
    changed = plan.of_ranks(
        found.ranks,
        found.reasons,
        left_out=tuple(one for place, one in enumerate(plan.devices) if place not in found.ranks),
        microbatch_sizes=(),
        stages=found.stages,
        replica_batch_sizes=found.replica_batch_sizes,
        shares=found.shares,
        local_batch_sizes=found.local_batch_sizes,
        memory_bytes=found.memory_bytes,
        predicted_step_seconds=found.step_seconds,
    )
    return routed(changed)


def with_memory(plan: Plan, spec: RunSpec, memory: RunMemory | None) -> Plan:
    """Return the plan with what each of its ranks will hold on each device.

    Raises:
        ConfigError: a device has less memory than it needs.
    """
    if memory is None:
        return plan
    if plan.all_devices == plan.devices:  # the passes of a rank that drives several devices are cut already
        counts = list(plan.local_batch_sizes)
        if spec.policy.follows:  # any device may get any part of the batch
            counts = [sum(counts)] * plan.world_size
        memory = memory.of(plan.devices, plan.local_batch_sizes, plan.precisions)
        plan = with_microbatches(plan, memory, counts)
        memory = memory.of(plan.devices, plan.local_batch_sizes, plan.precisions, plan.microbatch_sizes)
    problems = memory.problems()
    if problems:
        raise ConfigError(problems)
    needs: list[list[int]] = [[] for _ in plan.devices]
    for place, one in enumerate(memory.estimates):
        needs[plan.rank_of(place)] += [one.total_bytes] if one is not None else []
    unknown = [f"The memory that it needs is not known: {memory.reason}."] if memory.reason else []
    most = tuple(max(own, default=None) for own in needs)
    return replace(plan, memory_bytes=most, reasons=(*plan.reasons, *unknown))


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

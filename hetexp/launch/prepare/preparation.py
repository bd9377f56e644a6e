"""Makes a plan final: with stages of the model or shares of the batch, as the strategy needs.

The devices are measured, and their memory estimated, if the split depends on them.
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
from hetexp.launch.prepare.estimates import estimate_devices, estimate_memory
from hetexp.plan import calibrations
from hetexp.plan.calibrated_plan import Choice, calibrated_plan, choose, start_from_estimates
from hetexp.plan.device_estimates import MEASURED
from hetexp.plan.predict.paying_batch import headline
from hetexp.plan.routes import routed
from hetexp.plan.run_spec import RunSpec
from hetexp.plan.stages.assign import StageAssignment, StagedStrategy, assign_stages

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory

Measure = Callable[[Plan, RunSpec], dict[str, Any]]
"""Lets the ranks of a plan measure their devices, like `hetexp.launch.launcher.measure`."""


def prepare(plan: Plan, spec: RunSpec, measure: Measure) -> Plan:
    """Return the plan that is launched.

    Raises:
        ConfigError: a device has too little memory, or the model cannot be cut into these stages.
        SetupError, RunFailedError: the measurement of the devices could not start, or failed.
    """
    return spec.strategy.prepare(plan, Preparation(spec, measure))


class Preparation:
    """Makes the plan of a run final.

    Args:
        measure: `None` starts nothing: the plan then follows estimates, and `remarks` say so.
    """

    def __init__(self, spec: RunSpec, measure: Measure | None = None) -> None:
        self._spec, self._measure = spec, measure
        self.remarks: list[str] = []
        """Sentences about what the plan of a real run would follow."""

    def stages(self, plan: Plan, cuts: StagedStrategy) -> Plan:
        """Return the plan with each rank's stages.

        A rank's share is its part of a step's work, and its samples are those of its pipeline.

        Raises:
            ConfigError: the model may not be cut, or its stages do not fit the devices.
        """
        spec, policy = self._spec, self._spec.policy
        memory = self._estimated(plan)
        layers = layers_of(plan, spec, memory)
        estimates = estimate_devices(plan, spec, memory) if policy.measures or policy.follows else None
        check_memory = spec.config.hardware.check_memory
        return with_assignment(plan, assign_stages(plan, cuts, policy, layers, estimates, check_memory))

    def samples(self, plan: Plan) -> Plan:
        """Return the plan with each rank's samples, microbatch size and memory.

        Raises:
            ConfigError: a device has too little memory.
        """
        memory = self.memory(plan)
        return with_memory(self.split(plan, memory), self._spec, memory)

    def memory(self, plan: Plan) -> RunMemory | None:
        """Return the memory estimates of a plan's devices.

        `None` if only the CPU trains, where an estimate takes longer than a first small run, or with
        `hardware.check_memory=false`. The data set is built for the estimates.

        Raises:
            ConfigError: the ranks would refuse the data.
        """
        cpu = all(device.backend == "cpu" for device in plan.devices)
        if cpu or not self._spec.config.hardware.check_memory:
            if self._measure is not None:
                self._refuse_stream()
            return None
        return self._estimated(plan)

    def _refuse_stream(self) -> None:
        """Refuse a stream that no class shows to be one, before a run begins.

        Raises:
            ConfigError: the ranks would refuse the data.
        """
        from hetexp.training.streams import check_built_stream

        if problems := check_built_stream(self._spec.strategy, self._spec.config):
            raise ConfigError(problems)

    def _estimated(self, plan: Plan) -> RunMemory:
        """Return the memory estimates of a plan's devices, for which data and model are built.

        Raises:
            ConfigError: the ranks would refuse the data.
        """
        memory = estimate_memory(plan, self._spec)
        if memory.refusals:
            raise ConfigError(memory.refusals)
        return memory

    def split(self, plan: Plan, memory: RunMemory | None) -> Plan:
        """Return the plan with the split that measures best, if the policy measures and there is a choice.

        Devices that were measured for the same job before are not measured again. The split is chosen each
        time, because it depends on the batch, the memory and the policy. A policy that follows the devices
        starts from their estimates.

        Args:
            memory: limits the devices' microbatches, and caps their shares.
        """
        config, policy = self._spec.config, self._spec.policy
        if not (policy.measures or policy.follows) or plan.world_size < 2:
            return plan
        cached = calibrations.find(plan, config) if not policy.recalibrate else None
        if cached is None and (not policy.measures or config.trainer.fast_dev_run):
            kept = [] if policy.recalibrate else calibrations.known_devices(plan, config)
            return start_from_estimates(plan, kept, self._limits(plan, memory)[0]) if kept else plan
        if cached is None and self._measure is None:
            return self._before_measuring(plan, memory)
        scale = None
        if cached is None:
            assert self._measure is not None
            result = self._measure(plan, self._spec)
            measured = [DeviceCalibration.from_dict(raw) for raw in result["devices"]]
            exchange, scale = result["exchange"], result.get("time_scale")
            measured_at = calibrations.store(plan, config, result)
        else:
            measured, exchange = list(cached.devices), cached.exchange.to_dict()
            measured_at = cached.measured_at
            plan = replace(plan, reasons=(cached.reason(), *plan.reasons))
        devices, choice, first_line = self._best_split(plan, memory, measured, Exchange.from_dict(exchange))
        calibrations.keep_choice(plan, config, choice.ranks)
        entries = calibrations.names(plan, config)
        source = {"measured_at": measured_at, "cached": cached is not None, "entries": entries}
        source["time_scale"] = scale  # of this moment; an earlier run's machine may have been less busy
        source["earlier_time_scale"] = cached.time_scale if cached is not None else None
        return calibrated_plan(plan, devices, exchange, choice, source, first_line)

    def _before_measuring(self, plan: Plan, memory: RunMemory | None) -> Plan:
        """Return the plan with the best split by estimates, and add a remark about their source."""
        name = self._spec.request.choices.get("balancing", type(self._spec.policy).__name__.lower())
        first = f"A run measures its devices first (balancing={name})"
        estimates = estimate_devices(plan, self._spec, memory or estimate_memory(plan, self._spec))
        calibrated = [calibration for calibration in estimates.devices if calibration is not None]
        if len(calibrated) < plan.world_size:
            pairs = zip(plan.devices, estimates.devices, strict=True)
            names = ", ".join(device.id for device, calibration in pairs if calibration is None)
            self.remarks.append(f"{first}; this split is where it begins, as nothing is known of {names}.")
            return plan
        devices, choice, first_line = self._best_split(plan, memory, calibrated, estimates.exchange)
        source = " and ".join(dict.fromkeys(estimates.sources))
        if set(estimates.sources) == {MEASURED}:
            source = "measured before for another batch or strategy"
        self.remarks.append(f"{first}; this split and step are by figures {source}.")
        return calibrated_plan(plan, devices, estimates.exchange.to_dict(), choice, headline=first_line)

    def _best_split(
        self,
        plan: Plan,
        memory: RunMemory | None,
        measured: Sequence[DeviceCalibration],
        exchange: Exchange,
    ) -> tuple[list[DeviceCalibration], Choice, str]:
        """Return the devices within their memory, the split with the shortest step, and the plan's headline.

        Args:
            measured: each device of the plan alone.
            exchange: of gradients, as under DDP.

        Raises:
            ConfigError: the devices' memory together does not hold the batch.
        """
        strategy, policy = self._spec.strategy, self._spec.policy
        caps, sizes = self._limits(plan, memory)
        limits = zip(measured, caps, sizes, strict=True)
        devices = [device.capped(cap).split_microbatches(size or None) for device, cap, size in limits]
        step_exchange = strategy.step_exchange(exchange, plan, plan.devices)
        try:
            before = calibrations.earlier_choice(plan, self._spec.config) if not policy.recalibrate else None
            choice = choose(plan, devices, step_exchange, strategy.may_leave_out(policy), before)
        except ValueError as error:
            raise ConfigError(
                must_be(
                    "trainer.global_batch_size",
                    "what the devices' memory holds",
                    self._spec.config.trainer.global_batch_size,
                    f"{error}. A smaller trainer.microbatch_size needs less.",
                )
            ) from error
        return devices, choice, headline(plan, devices, step_exchange, choice)

    def _limits(
        self, plan: Plan, memory: RunMemory | None
    ) -> tuple[Sequence[int | None], Sequence[int | None]]:
        """Return each device's most samples of a step, and of a microbatch (0: not even one sample fits)."""
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


def with_assignment(plan: Plan, assignment: StageAssignment) -> Plan:
    """Return the plan of the devices that take part, in the order of their ranks, with their stages."""
    ranks = assignment.ranks
    changed = plan.of_ranks(
        ranks,
        assignment.reasons,
        left_out=tuple(device for place, device in enumerate(plan.devices) if place not in ranks),
        microbatch_sizes=(),
        stages=assignment.stages,
        replica_batch_sizes=assignment.replica_batch_sizes,
        shares=assignment.shares,
        local_batch_sizes=assignment.local_batch_sizes,
        memory_bytes=assignment.memory_bytes,
        predicted_step_seconds=assignment.step_seconds,
    )
    return routed(changed)


def with_memory(plan: Plan, spec: RunSpec, memory: RunMemory | None) -> Plan:
    """Return the plan with the memory that each rank needs, and with microbatches that fit.

    Raises:
        ConfigError: a device has too little memory.
    """
    if memory is None:
        return plan
    if plan.all_devices == plan.devices:  # a rank that drives several devices divides its samples already
        counts = list(plan.local_batch_sizes)
        if spec.policy.follows:  # any device may get the whole batch later
            counts = [sum(counts)] * plan.world_size
        memory = memory.of(plan.devices, plan.local_batch_sizes, plan.precisions)
        plan = with_microbatches(plan, memory, counts)
        memory = memory.of(plan.devices, plan.local_batch_sizes, plan.precisions, plan.microbatch_sizes)
    problems = memory.problems()
    if problems:
        raise ConfigError(problems)
    needs: list[list[int]] = [[] for _ in plan.devices]
    for place, estimate in enumerate(memory.estimates):
        needs[plan.rank_of(place)] += [estimate.total_bytes] if estimate is not None else []
    unknown = [f"The memory that it needs is not known: {memory.reason}."] if memory.reason else []
    most = tuple(max(bytes_of_rank, default=None) for bytes_of_rank in needs)
    return replace(plan, memory_bytes=most, reasons=(*plan.reasons, *unknown))


def with_microbatches(plan: Plan, memory: RunMemory, counts: Sequence[int]) -> Plan:
    """Return the plan with a microbatch size for each device whose memory does not hold all its samples.

    Args:
        memory: of the plan's devices.
        counts: the most samples of each device.
    """
    largest = memory.largest_passes(counts)
    before = plan.microbatch_sizes or (None,) * plan.world_size
    # 0 stands for a device that does not hold even one sample, which is reported as a problem.
    limits = [[n for n in pair if n] for pair in zip(before, largest, strict=True)]
    sizes = [min(pair, default=None) for pair in limits]
    reasons = [
        f"{device} takes its {samples} samples of a step in passes of at most {size}: its memory does not "
        "hold more."
        for device, samples, size in zip(plan.devices, plan.local_batch_sizes, sizes, strict=True)
        if size is not None and size < samples and plan.config["trainer"]["microbatch_size"] is None
    ]
    return replace(plan, microbatch_sizes=tuple(sizes), reasons=(*plan.reasons, *reasons))

"""The cost models from which strategies predict their runs on a plan's devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.energy import solve_for_energy, solve_within_watts
from hetexp.balancing.solver import solo_rates
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.core.stage import Layer, Stage
from hetexp.plan.calibrated_plan import Choice, choose, fastest_first, growing_sets, holds, step_of
from hetexp.plan.device_estimates import DeviceEstimates

ENERGY_TOLERANCE = 0.05
"""Largest relative difference between the step with the least energy and the shortest step."""
LEAST_ENERGY = "least energy"

Objective = Literal["time", "energy", "budget"]
"""Criterion of the recommended row."""
Needs = Callable[[Sequence[int], Sequence[int]], list[int | None]]
"""(ranks, samples of each) → memory need of each in bytes; `None`: not known."""


@dataclass(frozen=True)
class PredictedRun:
    """The prediction of one strategy with one policy. Unknown values are `None`."""

    policy: str | None
    """`None` if the strategy has no shares."""
    ranks: tuple[int, ...] = ()
    """Devices of the plan that take part."""
    counts: tuple[int, ...] = ()
    """Samples of each of them."""
    step_seconds: float | None = None
    samples_per_second: float | None = None
    efficiency: float | None = None
    """Throughput ÷ sum of the throughputs of each device alone, including devices that are left out."""
    ceiling: float | None = None
    """Best efficiency of any split with this strategy."""
    watts: float | None = None
    """Sum of the power limits of the devices that get samples."""
    joules_per_sample: float | None = None
    memory_bytes: tuple[int | None, ...] = ()
    problem: str | None = None
    """Why it cannot run, or is not predicted."""
    reasons: tuple[str, ...] = ()
    measures: bool = False
    """Whether the policy measures the devices' speeds, so that a real split follows them."""
    exact: bool = True
    """Whether each step is that of a single device; other strategies save time by different steps."""
    stages: tuple[tuple[Stage, ...], ...] = ()
    """Stages of each rank, if the strategy cuts the model."""
    bubble: float | None = None
    """Fraction of the devices' time in which a pipeline computes nothing."""
    strategy: str = ""
    """Option of the strategy, which `predict_runs` fills in."""

    @property
    def predicted(self) -> bool:
        """Whether it can run and its step is known."""
        return self.step_seconds is not None and self.problem is None

    def reaching(self, ceiling: float | None) -> PredictedRun:
        """Return the row with the best efficiency of its strategy."""
        return replace(self, ceiling=ceiling if self.efficiency is not None else None)


def _no_layers() -> Sequence[Layer]:
    raise ConfigError("the model's layers were not counted")


class PredictionInputs:
    """A plan's devices, and the cost models that several strategies share.

    Args:
        estimates: of the plan's devices.
        policies: by name, in the order of the rows.
        needs: memory of a split; `None`: memory is not checked.
        budget_watts: largest sum of power limits for the objective `budget`.
        layers: returns the model's layers; called if a strategy cuts the model.
    """

    def __init__(
        self,
        plan: Plan,
        estimates: DeviceEstimates,
        policies: Mapping[str, BalancingPolicy],
        needs: Needs | None = None,
        objective: Objective = "time",
        budget_watts: float | None = None,
        layers: Callable[[], Sequence[Layer]] = _no_layers,
    ) -> None:
        self.plan, self.estimates, self.policies, self._needs = plan, estimates, policies, needs
        self.linked = replace(plan, devices=estimates.linked)
        self.total: int = plan.config["trainer"]["global_batch_size"]
        self.names = [str(device) for device in plan.devices]
        self.curves = [one.curve if one is not None else None for one in estimates.devices]
        self.solo = tuple(
            solo_rates([curve], self.total)[0] if curve is not None else None for curve in self.curves
        )
        self.objective, self.budget_watts = objective, budget_watts
        self.layers = cache(layers)
        """Returns the model's layers; raises a `ConfigError` if the model may not be cut."""
        self._best: Choice | str | None = None

    def exchanging(self, exchange: Exchange) -> PredictionInputs:
        """Return the same devices, which exchange something else in a step."""
        other = copy(self)
        other.estimates, other._best = replace(self.estimates, exchange=exchange), None
        return other

    @property
    def devices(self) -> list[DeviceCalibration]:
        """Calibrations of the known devices."""
        return [calibration for calibration in self.estimates.devices if calibration is not None]

    @property
    def whole(self) -> float | None:
        """Sum of the throughputs of each device alone; `None` if a device is not known."""
        solo = [rate for rate in self.solo if rate is not None]
        return sum(solo) if len(solo) == len(self.solo) else None

    @property
    def checks_memory(self) -> bool:
        """Whether memory is checked."""
        return self._needs is not None

    @property
    def watts(self) -> list[float | None]:
        return [device.power_limit_watts for device in self.plan.devices]

    def unknown(self) -> str | None:
        """Return the reason why devices are not known; `None` if all are known."""
        if self.estimates.complete:
            return None
        if self.estimates.reason is not None:
            return self.estimates.reason
        names = ", ".join(n for n, one in zip(self.names, self.estimates.devices, strict=True) if one is None)
        return f"nothing is known of {names}"

    def best(self) -> Choice | str:
        """Return the devices and split with the shortest step, or why there are none."""
        if self._best is None:
            try:
                self._best = choose(self.linked, self.devices, self.estimates.exchange)
            except ValueError as error:
                self._best = f"{error}"
        return self._best

    def seconds(self, ranks: Sequence[int], counts: Sequence[int]) -> float | None:
        """Return the step of these devices with this split; `None` if one of them is not known."""
        chosen = [one for rank in ranks if (one := self.estimates.devices[rank]) is not None]
        if len(chosen) < len(ranks):
            return None
        specs = [self.linked.devices[rank] for rank in ranks]
        return step_of(self.plan, specs, chosen, self.estimates.exchange, counts)

    def alone(self) -> PredictedRun:
        """Return the row of the fastest device that holds the whole batch."""
        able = [
            (curve.seconds(self.total), rank)
            for rank, curve in enumerate(self.curves)
            if curve is not None and (curve.cap is None or curve.cap >= self.total)
        ]
        if not able:
            why = self.unknown() or f"no device alone holds {self.total} samples"
            return PredictedRun(None, problem=why)
        _, rank = min(able)
        row = self.row(None, (rank,), (self.total,))
        return replace(row, ceiling=row.efficiency)

    def all_reduced(self) -> list[PredictedRun]:
        """Return the rows of an all-reduce in backward: one for each policy, and one for the objective."""
        if len(self.plan.devices) == 1:
            return [self.alone()]
        rows = [self._shared(name, policy) for name, policy in self.policies.items()]
        if self.objective == "energy":
            rows.append(self._thrifty())
        elif self.budget_watts is not None:
            rows.append(self._within(self.budget_watts))
        return rows

    def _shared(self, name: str, policy: BalancingPolicy) -> PredictedRun:
        """Return the row of a policy."""
        if policy.measures or policy.follows:
            return replace(self._settled(name, policy), measures=True)
        try:
            shares = policy.shares(self.plan.devices, self.plan.precisions)
        except ConfigError as error:
            return PredictedRun(name, problem=" ".join(error.problems))
        counts = apportion(self.total, shares).counts
        return self.row(name, tuple(range(len(counts))), counts)

    def _settled(self, name: str, policy: BalancingPolicy) -> PredictedRun:
        """Return the row of a policy that measures the devices."""
        why = self.unknown()
        if why is not None:
            return PredictedRun(name, problem=f"{why}: it would be measured first")
        choice = self.best()
        if not isinstance(choice, str) and not (policy.measures and policy.drop_slower):
            choice = choose(self.linked, self.devices, self.estimates.exchange, drop_slower=False)
        if isinstance(choice, str):
            return PredictedRun(name, problem=choice)
        row = self.row(name, choice.ranks, choice.split.counts)
        return replace(row, reasons=choice.reasons[:-1])  # the last has the split, which the table shows

    def _thrifty(self) -> PredictedRun:
        """Return the row of the split with the least energy whose step is hardly longer than the shortest."""
        best = self.best() if self.estimates.complete else f"{self.unknown()}"
        watts = [limit for limit in self.watts if limit is not None]
        if isinstance(best, str) or len(watts) < len(self.watts):
            return PredictedRun(LEAST_ENERGY, problem=best if isinstance(best, str) else self._no_watts())
        rows = [self.row(LEAST_ENERGY, best.ranks, best.split.counts)]
        for ranks in self._sets():
            curves = [self.devices[rank].curve for rank in ranks]
            more = [watts[r] * curve.seconds_per_sample for r, curve in zip(ranks, curves, strict=True)]
            split = solve_for_energy(curves, self.total, more, ENERGY_TOLERANCE)
            row = self._used(LEAST_ENERGY, ranks, split.counts)
            if row.predicted and (row.step_seconds or 0) <= best.step_seconds * (1 + ENERGY_TOLERANCE):
                rows.append(row)
        return min(rows, key=lambda row: row.joules_per_sample or 0.0)

    def _within(self, budget: float) -> PredictedRun:
        """Return the row of the fastest split within a budget of watts."""
        name = f"within {budget:g} W"
        watts = [limit for limit in self.watts if limit is not None]
        why = self.unknown() or (self._no_watts() if len(watts) < len(self.watts) else None)
        if why is not None:
            return PredictedRun(name, problem=why)
        try:
            split = solve_within_watts([d.curve for d in self.devices], self.total, watts, budget)
        except ValueError as error:
            return PredictedRun(name, problem=f"{error}")
        used = [rank for rank, count in enumerate(split.counts) if count]
        part = replace(self.linked, devices=tuple(self.linked.devices[rank] for rank in used))
        choice = choose(part, [self.devices[rank] for rank in used], self.estimates.exchange)
        rows = [self.row(name, [used[rank] for rank in choice.ranks], choice.split.counts)]
        # The exchange, which the solver does not see, may make a device alone the fastest.
        alone = [
            rank
            for rank, one in enumerate(watts)
            if one <= budget and holds(self.devices, [rank], self.total)
        ]
        rows += [self.row(name, [rank], [self.total]) for rank in alone]
        return min(rows, key=lambda row: (not row.predicted, row.step_seconds or 0.0))

    def timed(self, row: PredictedRun, seconds: float | None) -> PredictedRun:
        """Return a row with the seconds of a step, and the resulting rate and efficiency."""
        rate = self.total / seconds if seconds else None
        efficiency = rate / self.whole if rate is not None and self.whole else None
        return replace(row, step_seconds=seconds, samples_per_second=rate, efficiency=efficiency)

    def row(self, policy: str | None, ranks: Sequence[int], counts: Sequence[int]) -> PredictedRun:
        """Return the row of a split over some of the devices."""
        seconds = self.seconds(ranks, counts)
        whole = self.whole
        best = self.best() if whole is not None else None
        memory = self._needs(ranks, counts) if self._needs is not None else [None] * len(ranks)
        working = [rank for rank, count in zip(ranks, counts, strict=True) if count]
        draws = [self.watts[rank] for rank in working]
        watts = sum(draw or 0.0 for draw in draws) if None not in draws else None
        row = PredictedRun(
            policy,
            tuple(ranks),
            tuple(counts),
            ceiling=self.total / best.step_seconds / whole if isinstance(best, Choice) and whole else None,
            watts=watts,
            joules_per_sample=self._joules(working, ranks, counts) if watts is not None else None,
            memory_bytes=tuple(memory),
            problem=self._too_large(ranks, counts, memory),
        )
        return self.timed(row, seconds)

    def _used(self, policy: str, ranks: Sequence[int], counts: Sequence[int]) -> PredictedRun:
        """Return the row of the devices that get samples."""
        used = [(rank, count) for rank, count in zip(ranks, counts, strict=True) if count]
        return self.row(policy, [rank for rank, _ in used], [count for _, count in used])

    def _sets(self) -> list[tuple[int, ...]]:
        """Return the sets of the fastest device, the two fastest ones, and so on, that hold the batch."""
        sets = growing_sets(fastest_first(self.devices, self.total))
        return [ranks for ranks in sets if holds(self.devices, ranks, self.total)]

    def _joules(self, working: Sequence[int], ranks: Sequence[int], counts: Sequence[int]) -> float | None:
        local = dict(zip(ranks, counts, strict=True))
        total = 0.0
        for rank in working:
            curve, watts = self.curves[rank], self.watts[rank]
            if curve is None or watts is None:
                return None
            total += watts * curve.seconds(local[rank])
        return total / self.total

    def _no_watts(self) -> str:
        names = ", ".join(name for name, watts in zip(self.names, self.watts, strict=True) if watts is None)
        return f"the power limit of {names} is not known"

    def _too_large(
        self, ranks: Sequence[int], counts: Sequence[int], memory: Sequence[int | None]
    ) -> str | None:
        """Return the problem of devices whose memory does not hold their samples."""
        problems = []
        for rank, count, need in zip(ranks, counts, memory, strict=True):
            has, curve = self.plan.devices[rank].memory_bytes, self.curves[rank]
            if need is not None and has is not None and need > has:
                gib = 2**30
                problems.append(f"{self.names[rank]} needs {need / gib:.1f} of {has / gib:.1f} GiB")
            elif curve is not None and curve.cap is not None and count > curve.cap:
                problems.append(f"{self.names[rank]} holds {curve.cap} of its {count} samples")
        return f"does not fit: {', '.join(problems)}" if problems else None

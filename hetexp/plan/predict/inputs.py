"""A plan's devices, and the rows that strategies and policies make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.energy import solve_for_energy, solve_within_watts
from hetexp.balancing.solver import solo_rates
from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.core.stage import Stage
from hetexp.plan.known import Known
from hetexp.plan.measured import Choice, by_speed, choose, growing_sets, holds, step_of

ENERGY_TOLERANCE = 0.05
"""By what fraction the thriftiest step may be longer than the fastest."""
LEAST_ENERGY = "least energy"

Needs = Callable[[Sequence[int], Sequence[int]], list[int | None]]
"""(ranks, samples of each) → memory that each needs in bytes, `None` where it is not known."""


@dataclass(frozen=True)
class PredictedRun:
    """One strategy with one policy. What is not known is `None`."""

    strategy: str
    policy: str | None
    """`None` where the strategy leaves nothing to share."""
    ranks: tuple[int, ...] = ()
    """Devices of the plan that take part."""
    counts: tuple[int, ...] = ()
    """Samples of each of them."""
    step_seconds: float | None = None
    samples_per_second: float | None = None
    efficiency: float | None = None
    """Throughput ÷ sum of the solo throughputs of all devices of the plan, those left out included."""
    ceiling: float | None = None
    """The best efficiency that any split of this strategy reaches."""
    watts: float | None = None
    """Power limits together of the devices that get samples."""
    joules_per_sample: float | None = None
    memory_bytes: tuple[int | None, ...] = ()
    problem: str | None = None
    """Why it cannot run like this, or is not predicted."""
    reasons: tuple[str, ...] = ()
    measures: bool = False
    """Whether the policy finds the devices' speeds out, so that the split follows what they really are."""
    exact: bool = True
    """Whether each step is a single device's; other strategies gain time by learning otherwise."""
    stages: tuple[tuple[Stage, ...], ...] = ()
    """Of each of the ranks its pieces of the model, where the strategy cuts it."""
    bubble: float | None = None
    """Fraction of the devices' time in which a pipeline computes nothing."""

    @property
    def predicted(self) -> bool:
        """Whether it can run and its step is known."""
        return self.step_seconds is not None and self.problem is None

    def reaching(self, ceiling: float | None) -> PredictedRun:
        """Return the row with the best efficiency of its strategy."""
        return replace(self, ceiling=ceiling if self.efficiency is not None else None)


class PredictionInputs:
    """A plan's devices, asked for one row after another."""

    def __init__(
        self, plan: Plan, known: Known, needs: Needs | None, policies: Mapping[str, BalancingPolicy]
    ) -> None:
        self.plan, self.known, self.policies, self._needs = plan, known, policies, needs
        self.linked = replace(plan, devices=known.linked)
        self.total: int = plan.config["trainer"]["global_batch_size"]
        self.names = [str(device) for device in plan.devices]
        self.curves = [one.curve if one is not None else None for one in known.devices]
        self.solo = tuple(
            solo_rates([curve], self.total)[0] if curve is not None else None for curve in self.curves
        )
        self._best: Choice | str | None = None

    @property
    def devices(self) -> list[DeviceCalibration]:
        """All devices' curves, where all are known."""
        return [one for one in self.known.devices if one is not None]

    @property
    def whole(self) -> float | None:
        """Sum of what all devices do alone, where all are known."""
        solo = [one for one in self.solo if one is not None]
        return sum(solo) if len(solo) == len(self.solo) else None

    @property
    def checks_memory(self) -> bool:
        """Whether anybody wants to know what fits."""
        return self._needs is not None

    @property
    def watts(self) -> list[float | None]:
        return [device.power_limit_watts for device in self.plan.devices]

    def unknown(self) -> str | None:
        """Say which devices nothing is known of, `None` where there is none."""
        if self.known.complete:
            return None
        if self.known.reason is not None:
            return self.known.reason
        names = ", ".join(n for n, one in zip(self.names, self.known.devices, strict=True) if one is None)
        return f"nothing is known of {names}"

    def best(self) -> Choice | str:
        """Return the fastest set of devices and split, or why there is none."""
        if self._best is None:
            try:
                self._best = choose(self.linked, self.devices, self.known.exchange)
            except ValueError as error:
                self._best = f"{error}"
        return self._best

    def seconds(self, ranks: Sequence[int], counts: Sequence[int]) -> float | None:
        """Return the step of these devices with this split, `None` where one of them is not known."""
        chosen = [one for rank in ranks if (one := self.known.devices[rank]) is not None]
        if len(chosen) < len(ranks):
            return None
        specs = [self.linked.devices[rank] for rank in ranks]
        return step_of(self.plan, specs, chosen, self.known.exchange, counts)

    def alone(self, strategy: str) -> PredictedRun:
        """Return the fastest device that holds the whole batch."""
        able = [
            (curve.seconds(self.total), rank)
            for rank, curve in enumerate(self.curves)
            if curve is not None and (curve.cap is None or curve.cap >= self.total)
        ]
        if not able:
            why = self.unknown() or f"no device alone holds {self.total} samples"
            return PredictedRun(strategy, None, problem=why)
        _, rank = min(able)
        row = self.row(strategy, None, (rank,), (self.total,))
        return replace(row, ceiling=row.efficiency)

    def shared(self, strategy: str, name: str, policy: BalancingPolicy) -> PredictedRun:
        """Return what a policy makes of the devices."""
        if policy.measures or policy.follows:
            return replace(self._settled(strategy, name, policy), measures=True)
        try:
            shares = policy.shares(self.plan.devices, self.plan.precisions)
        except ConfigError as error:
            return PredictedRun(strategy, name, problem=" ".join(error.problems))
        counts = apportion(self.total, shares).counts
        return self.row(strategy, name, tuple(range(len(counts))), counts)

    def _settled(self, strategy: str, name: str, policy: BalancingPolicy) -> PredictedRun:
        """Return where a policy ends that finds the devices' speeds out."""
        why = self.unknown()
        if why is not None:
            return PredictedRun(strategy, name, problem=f"{why}: it would be measured first")
        choice = self.best()
        if not isinstance(choice, str) and not (policy.measures and policy.drop_slower):
            choice = choose(self.linked, self.devices, self.known.exchange, drop_slower=False)
        if isinstance(choice, str):
            return PredictedRun(strategy, name, problem=choice)
        row = self.row(strategy, name, choice.ranks, choice.split.counts)
        return replace(row, reasons=choice.reasons[:-1])  # the last tells the split, as the table does

    def thrifty(self, strategy: str) -> PredictedRun:
        """Return the split that needs least energy of those hardly slower than the fastest."""
        best = self.best() if self.known.complete else f"{self.unknown()}"
        watts = [one for one in self.watts if one is not None]
        if isinstance(best, str) or len(watts) < len(self.watts):
            return PredictedRun(
                strategy, LEAST_ENERGY, problem=best if isinstance(best, str) else self._no_watts()
            )
        rows = [self.row(strategy, LEAST_ENERGY, best.ranks, best.split.counts)]
        for ranks in self._sets():
            curves = [self.devices[rank].curve for rank in ranks]
            more = [watts[r] * curve.seconds_per_sample for r, curve in zip(ranks, curves, strict=True)]
            split = solve_for_energy(curves, self.total, more, ENERGY_TOLERANCE)
            row = self._used(strategy, LEAST_ENERGY, ranks, split.counts)
            if row.predicted and (row.step_seconds or 0) <= best.step_seconds * (1 + ENERGY_TOLERANCE):
                rows.append(row)
        return min(rows, key=lambda row: row.joules_per_sample or 0.0)

    def within(self, strategy: str, budget: float) -> PredictedRun:
        """Return the fastest split whose devices draw no more than a budget."""
        name = f"within {budget:g} W"
        watts = [one for one in self.watts if one is not None]
        why = self.unknown() or (self._no_watts() if len(watts) < len(self.watts) else None)
        if why is not None:
            return PredictedRun(strategy, name, problem=why)
        try:
            split = solve_within_watts([d.curve for d in self.devices], self.total, watts, budget)
        except ValueError as error:
            return PredictedRun(strategy, name, problem=f"{error}")
        used = [rank for rank, count in enumerate(split.counts) if count]
        part = replace(self.linked, devices=tuple(self.linked.devices[rank] for rank in used))
        choice = choose(part, [self.devices[rank] for rank in used], self.known.exchange)
        rows = [self.row(strategy, name, [used[rank] for rank in choice.ranks], choice.split.counts)]
        # The exchange, which the solver does not see, may make a device alone the fastest.
        alone = [
            rank
            for rank, one in enumerate(watts)
            if one <= budget and holds(self.devices, [rank], self.total)
        ]
        rows += [self.row(strategy, name, [rank], [self.total]) for rank in alone]
        return min(rows, key=lambda row: (not row.predicted, row.step_seconds or 0.0))

    def row(
        self, strategy: str, policy: str | None, ranks: Sequence[int], counts: Sequence[int]
    ) -> PredictedRun:
        """Return the row of a split over some of the devices."""
        seconds = self.seconds(ranks, counts)
        rate = self.total / seconds if seconds is not None else None
        whole = self.whole
        best = self.best() if whole is not None else None
        memory = self._needs(ranks, counts) if self._needs is not None else [None] * len(ranks)
        working = [rank for rank, count in zip(ranks, counts, strict=True) if count]
        draws = [self.watts[rank] for rank in working]
        watts = sum(one or 0.0 for one in draws) if None not in draws else None
        return PredictedRun(
            strategy,
            policy,
            tuple(ranks),
            tuple(counts),
            step_seconds=seconds,
            samples_per_second=rate,
            efficiency=rate / whole if rate is not None and whole else None,
            ceiling=self.total / best.step_seconds / whole if isinstance(best, Choice) and whole else None,
            watts=watts,
            joules_per_sample=self._joules(working, ranks, counts) if watts is not None else None,
            memory_bytes=tuple(memory),
            problem=self._too_large(ranks, counts, memory),
        )

    def _used(self, strategy: str, policy: str, ranks: Sequence[int], counts: Sequence[int]) -> PredictedRun:
        """Return the row of those devices that get samples."""
        used = [(rank, count) for rank, count in zip(ranks, counts, strict=True) if count]
        return self.row(strategy, policy, [rank for rank, _ in used], [count for _, count in used])

    def _sets(self) -> list[tuple[int, ...]]:
        """Return the sets of devices that hold the batch: the fastest, the two fastest, and so on."""
        sets = growing_sets(by_speed(self.devices, self.total))
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
        """Say which devices the split is too much for."""
        problems = []
        for rank, count, need in zip(ranks, counts, memory, strict=True):
            has, curve = self.plan.devices[rank].memory_bytes, self.curves[rank]
            if need is not None and has is not None and need > has:
                gib = 2**30
                problems.append(f"{self.names[rank]} needs {need / gib:.1f} of {has / gib:.1f} GiB")
            elif curve is not None and curve.cap is not None and count > curve.cap:
                problems.append(f"{self.names[rank]} holds {curve.cap} of its {count} samples")
        return f"does not fit: {', '.join(problems)}" if problems else None

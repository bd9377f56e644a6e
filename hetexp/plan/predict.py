"""What each strategy with each policy would make of a plan's devices, before anything runs.

A row is predicted by the same functions as a measured plan (`hetexp.plan.measured`): same figures in, same
step out. Energy is what the devices draw at their power limits while they work; what they draw while they
wait, and what their host draws, is known of none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.energy import solve_for_energy, solve_within_watts
from hetexp.balancing.solver import solo_rates
from hetexp.core.calibration import DeviceCalibration
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.plan.known import MEASURED, Known
from hetexp.plan.measured import LEAST_GAIN, Choice, by_speed, choose, growing_sets, holds, step_of
from hetexp.strategy.base import Strategy

ENERGY_TOLERANCE = 0.05
"""By what fraction the thriftiest step may be longer than the fastest."""
LEAST_ENERGY = "least energy"

Objective = Literal["time", "energy", "budget"]
Needs = Callable[[Sequence[int], Sequence[int]], list[int | None]]
"""(ranks, samples of each) → memory that each needs in bytes, `None` where it is not known."""


@dataclass(frozen=True)
class Row:
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

    @property
    def predicted(self) -> bool:
        """Whether it can run and its step is known."""
        return self.step_seconds is not None and self.problem is None


@dataclass(frozen=True)
class Forecast:
    """All rows of a plan's devices, and which of them is best."""

    plan: Plan
    known: Known
    total: int
    """Samples of a step."""
    solo_samples_per_second: tuple[float | None, ...]
    """Of each device alone with the whole batch, or what its memory holds of it."""
    rows: tuple[Row, ...]
    best: Row | None
    reasons: tuple[str, ...] = field(default=())
    """Why it is the best, or why there is none."""


def forecast(
    plan: Plan,
    known: Known,
    strategies: Mapping[str, Strategy],
    policies: Mapping[str, BalancingPolicy],
    needs: Needs | None = None,
    objective: Objective = "time",
    budget_watts: float | None = None,
    preferred: str | None = None,
) -> Forecast:
    """Predict every strategy with every policy.

    Args:
        plan: of the devices; its own shares and strategy do not matter.
        known: of each device of the plan.
        strategies: by name.
        policies: by name, in the order of the rows.
        needs: memory of a split; `None` where nobody wants it estimated.
        objective: what the recommended row is best in.
        budget_watts: most that the devices with samples may draw together; needed for `budget`.
        preferred: policy that is recommended before others that are as good.
    """
    scene = Scene(plan, known, needs, policies)
    rows: list[Row] = []
    for name, strategy in strategies.items():
        if strategy.predicted_as == "alone":
            rows.append(scene.alone(name))
        elif strategy.predicted_as == "all_reduce" and len(plan.devices) > 1:
            rows += [scene.shared(name, label, policy) for label, policy in policies.items()]
            if objective == "energy":
                rows.append(scene.thrifty(name))
            elif budget_watts is not None:
                rows.append(scene.within(name, budget_watts))
        elif strategy.predicted_as == "all_reduce":
            rows.append(replace(scene.alone(name), strategy=name))
        else:
            rows.append(Row(name, None, problem="the cost model does not know this strategy"))
    best, reasons = recommend(rows, scene, objective, budget_watts, preferred)
    return Forecast(plan, known, scene.total, scene.solo, tuple(rows), best, tuple(reasons))


class Scene:
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
        return step_of(specs, self.plan.network, chosen, self.known.exchange, counts)

    def alone(self, strategy: str) -> Row:
        """Return the fastest device that holds the whole batch."""
        able = [
            (curve.seconds(self.total), rank)
            for rank, curve in enumerate(self.curves)
            if curve is not None and (curve.cap is None or curve.cap >= self.total)
        ]
        if not able:
            why = self.unknown() or f"no device alone holds {self.total} samples"
            return Row(strategy, None, problem=why)
        _, rank = min(able)
        row = self.row(strategy, None, (rank,), (self.total,))
        return replace(row, ceiling=row.efficiency)

    def shared(self, strategy: str, name: str, policy: BalancingPolicy) -> Row:
        """Return what a policy makes of the devices."""
        if policy.measures or policy.follows:
            return replace(self._settled(strategy, name, policy), measures=True)
        try:
            shares = policy.shares(self.plan.devices, self.plan.precisions)
        except ConfigError as error:
            return Row(strategy, name, problem=" ".join(error.problems))
        counts = apportion(self.total, shares).counts
        return self.row(strategy, name, tuple(range(len(counts))), counts)

    def _settled(self, strategy: str, name: str, policy: BalancingPolicy) -> Row:
        """Return where a policy ends that finds the devices' speeds out."""
        why = self.unknown()
        if why is not None:
            return Row(strategy, name, problem=f"{why}: it would be measured first")
        choice = self.best()
        if not isinstance(choice, str) and not (policy.measures and policy.drop_slower):
            choice = choose(self.linked, self.devices, self.known.exchange, drop_slower=False)
        if isinstance(choice, str):
            return Row(strategy, name, problem=choice)
        row = self.row(strategy, name, choice.ranks, choice.split.counts)
        return replace(row, reasons=choice.reasons[:-1])  # the last tells the split, as the table does

    def thrifty(self, strategy: str) -> Row:
        """Return the split that needs least energy of those hardly slower than the fastest."""
        best = self.best() if self.known.complete else f"{self.unknown()}"
        watts = [one for one in self.watts if one is not None]
        if isinstance(best, str) or len(watts) < len(self.watts):
            return Row(strategy, LEAST_ENERGY, problem=best if isinstance(best, str) else self._no_watts())
        rows = [self.row(strategy, LEAST_ENERGY, best.ranks, best.split.counts)]
        for ranks in self._sets():
            curves = [self.devices[rank].curve for rank in ranks]
            more = [watts[r] * curve.seconds_per_sample for r, curve in zip(ranks, curves, strict=True)]
            split = solve_for_energy(curves, self.total, more, ENERGY_TOLERANCE)
            row = self._used(strategy, LEAST_ENERGY, ranks, split.counts)
            if row.predicted and (row.step_seconds or 0) <= best.step_seconds * (1 + ENERGY_TOLERANCE):
                rows.append(row)
        return min(rows, key=lambda row: row.joules_per_sample or 0.0)

    def within(self, strategy: str, budget: float) -> Row:
        """Return the fastest split whose devices draw no more than a budget."""
        name = f"within {budget:g} W"
        watts = [one for one in self.watts if one is not None]
        why = self.unknown() or (self._no_watts() if len(watts) < len(self.watts) else None)
        if why is not None:
            return Row(strategy, name, problem=why)
        try:
            split = solve_within_watts([d.curve for d in self.devices], self.total, watts, budget)
        except ValueError as error:
            return Row(strategy, name, problem=f"{error}")
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

    def row(self, strategy: str, policy: str | None, ranks: Sequence[int], counts: Sequence[int]) -> Row:
        """Return the row of a split over some of the devices."""
        seconds = self.seconds(ranks, counts)
        rate = self.total / seconds if seconds is not None else None
        solo = [one for one in self.solo if one is not None]
        whole = sum(solo) if len(solo) == len(self.solo) else None
        best = self.best() if whole is not None else None
        memory = self._needs(ranks, counts) if self._needs is not None else [None] * len(ranks)
        working = [rank for rank, count in zip(ranks, counts, strict=True) if count]
        draws = [self.watts[rank] for rank in working]
        watts = sum(one or 0.0 for one in draws) if None not in draws else None
        return Row(
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

    def _used(self, strategy: str, policy: str, ranks: Sequence[int], counts: Sequence[int]) -> Row:
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


def recommend(
    rows: Sequence[Row],
    scene: Scene,
    objective: Objective,
    budget_watts: float | None,
    preferred: str | None = None,
) -> tuple[Row | None, list[str]]:
    """Return the best row and why it is the best, or why there is none.

    Of rows whose difference cannot be measured the simplest is taken; but where the figures are not measured,
    one that measures, since it corrects them.
    """
    fit = [row for row in rows if row.predicted]
    if objective == "budget":
        fit = [row for row in fit if row.watts is not None and row.watts <= (budget_watts or 0.0)]
    why = scene.unknown()
    if why is not None:
        return None, [
            f"No recommendation: {why}, neither by measurement nor by the catalogue. balancing=profiled "
            "measures the devices before it trains, and leaves out those that make the job slower."
        ]
    if not fit:
        told = dict.fromkeys(row.problem for row in rows if row.problem is not None)
        return None, [f"No recommendation: {'; '.join(told) or 'nothing keeps within the budget'}."]
    fastest = min(row.step_seconds or 0.0 for row in fit)
    if objective == "energy":
        within = fastest * (1 + ENERGY_TOLERANCE)
        fit = [row for row in fit if row.joules_per_sample is not None]
        fit = [row for row in fit if (row.step_seconds or 0.0) <= within]
        if not fit:
            return None, [f"No recommendation: {scene._no_watts()}."]
        best = min(fit, key=lambda row: row.joules_per_sample or 0.0)
    else:
        near = [row for row in fit if (row.step_seconds or 0.0) * (1 - LEAST_GAIN) <= fastest]
        measured = all(source == MEASURED for source in scene.known.sources)

        def order(row: Row) -> tuple[bool, bool, bool, float]:
            other = row.policy != preferred
            return row.measures == measured, row.policy is not None, other, row.step_seconds or 0.0

        best = min(near, key=order)
    return best, _reasons(best, rows, scene, objective)


def _reasons(best: Row, rows: Sequence[Row], scene: Scene, objective: Objective) -> list[str]:
    """Say what the best row gains over the fastest device alone and an equal split, and who is left out."""
    assert best.step_seconds is not None
    name = " + ".join(part for part in (best.strategy, best.policy) if part is not None)
    text = f"{name}: {scene.total} samples are predicted to take {best.step_seconds:.4g} s a step"
    others = []
    solo = [row.step_seconds or 0.0 for row in rows if row.predicted and len(row.ranks) == 1]
    equal = next((row for row in rows if row.policy == "equal" and row.predicted), None)
    if objective == "time" and solo and len(best.ranks) > 1:
        others.append(f"{min(solo) / best.step_seconds:.2f}× as fast as the fastest device alone")
    if objective == "time" and equal is not None and equal is not best and equal.step_seconds is not None:
        others.append(f"{equal.step_seconds / best.step_seconds:.2f}× as fast as an equal split")
    if objective == "energy" and best.joules_per_sample is not None:
        fastest = min((row for row in rows if row.predicted), key=lambda row: row.step_seconds or 0.0)
        longer = best.step_seconds / (fastest.step_seconds or best.step_seconds) - 1
        saved = 1 - best.joules_per_sample / (fastest.joules_per_sample or best.joules_per_sample)
        others.append(f"{saved:.1%} less energy than the fastest, in a step {longer:.1%} longer")
    if objective == "budget" and best.watts is not None:
        others.append(f"with devices that draw up to {best.watts:g} W")
    reasons = [f"{text}{', ' + ', '.join(others) if others else ''}."]
    if best.policy is None or best.policy not in scene.policies:
        reasons += _how_to_run(best, scene)
    choice = scene.best()
    left_out = set(range(len(scene.names))) - set(best.ranks)
    if best.reasons or not left_out:
        return reasons + list(best.reasons)
    if isinstance(choice, Choice) and objective == "time":
        return reasons + list(choice.reasons[:-1])
    names = ", ".join(scene.names[rank] for rank in sorted(left_out))
    what = "it needs less energy" if objective == "energy" else "the budget is kept"
    return [*reasons, f"Without {names} {what}."]


def _how_to_run(best: Row, scene: Scene) -> list[str]:
    """Return the words that train like this where no policy does; none where they would not say all."""
    devices = [scene.plan.devices[rank] for rank in best.ranks]
    if any(d.slow != 1.0 or d.limited or d.python is not None or d.host is not None for d in devices):
        return []
    names = [f"emulated:{d.card}" if d.backend == "emulated" else d.id for d in devices]
    words = f"hardware=auto hardware.devices=[{','.join(names)}] strategy={best.strategy}"
    if best.policy is not None and len(devices) > 1:
        words += f" balancing=manual balancing.weights=[{','.join(map(str, best.counts))}]"
    return [f"To train like this: {words}"]

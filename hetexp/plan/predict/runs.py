"""Predicts each strategy with each policy on a plan's devices, before anything runs.

The same functions predict a row and a calibrated plan (`hetexp.plan.calibrated_plan`), so that equal figures
give equal steps. The energy is that of working devices at their power limits. It leaves out the devices that
wait, and the hosts, because their power is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hetexp.core.plan import Plan
from hetexp.plan.calibrated_plan import LEAST_GAIN, Choice
from hetexp.plan.device_estimates import MEASURED, DeviceEstimates
from hetexp.plan.predict.inputs import ENERGY_TOLERANCE, PredictedRun, PredictionInputs
from hetexp.plan.predict.paying_batch import BatchPrediction
from hetexp.plan.strategy import Strategy


@dataclass(frozen=True)
class Prediction:
    """All rows of a plan's devices, and which of them is best."""

    plan: Plan
    estimates: DeviceEstimates
    total: int
    """Samples of a step."""
    solo_samples_per_second: tuple[float | None, ...]
    """Throughput of each device alone, with the whole batch or the part that its memory holds."""
    rows: tuple[PredictedRun, ...]
    best: PredictedRun | None
    reasons: tuple[str, ...] = field(default=())
    """Why it is the best, or why there is none."""
    ends: str = ""
    """What ends a run."""
    preferred: str | None = None
    """Policy of the run."""
    paying: BatchPrediction | None = None
    """Smallest larger batch with which more devices pay, if the best row leaves devices out."""
    answer: str = ""
    """The answer in one sentence (`hetexp.plan.predict.answer`)."""


def predict_runs(
    inputs: PredictionInputs,
    strategies: Mapping[str, Strategy],
    preferred: str | None = None,
    refusals: Mapping[str, str] = MappingProxyType({}),
) -> Prediction:
    """Predict every strategy with every policy.

    Args:
        inputs: of a plan whose own shares and strategy do not matter.
        strategies: by name.
        preferred: policy that is recommended before equally good ones.
        refusals: strategy → why it cannot run on these devices.
    """
    rows: list[PredictedRun] = []
    for name, strategy in strategies.items():
        refused = refusals.get(name)
        predicted = strategy.predict(inputs) if refused is None else [PredictedRun(None, problem=refused)]
        rows += [replace(row, strategy=name, exact=strategy.exact) for row in predicted]
    best, reasons = recommend(rows, inputs, preferred)
    solo, why = inputs.solo, tuple(reasons)
    return Prediction(
        inputs.plan, inputs.estimates, inputs.total, solo, tuple(rows), best, why, preferred=preferred
    )


def recommend(
    rows: Sequence[PredictedRun], inputs: PredictionInputs, preferred: str | None = None
) -> tuple[PredictedRun | None, list[str]]:
    """Return the best row with the reasons, or why there is none.

    Of rows with a difference too small to measure, a single device is taken. If there is none and the figures
    are not measured, a row whose policy measures comes first, because it corrects them. Only exact strategies
    are recommended.
    """
    objective, budget_watts = inputs.objective, inputs.budget_watts
    fit = [row for row in rows if row.predicted and row.exact]
    if objective == "budget":
        fit = [row for row in fit if row.watts is not None and row.watts <= (budget_watts or 0.0)]
    why = inputs.unknown()
    if why is not None:
        return None, [
            f"No recommendation: {why}, neither by measurement nor by the catalogue. balancing=profiled "
            "measures the devices before it trains, and leaves out those that make the job slower."
        ]
    if not fit:
        problems = dict.fromkeys(row.problem for row in rows if row.problem is not None)
        return None, [f"No recommendation: {'; '.join(problems) or 'nothing keeps within the budget'}."]
    fastest = min(row.step_seconds or 0.0 for row in fit)
    if objective == "energy":
        within = fastest * (1 + ENERGY_TOLERANCE)
        fit = [row for row in fit if row.joules_per_sample is not None]
        fit = [row for row in fit if (row.step_seconds or 0.0) <= within]
        if not fit:
            return None, [f"No recommendation: {inputs._no_watts()}."]
        best = min(fit, key=lambda row: row.joules_per_sample or 0.0)
    else:
        near = [row for row in fit if (row.step_seconds or 0.0) * (1 - LEAST_GAIN) <= fastest]
        measured = all(source == MEASURED for source in inputs.estimates.sources)

        def order(row: PredictedRun) -> tuple[bool, bool, bool, float]:
            other = row.policy != preferred
            return row.policy is not None, row.measures == measured, other, row.step_seconds or 0.0

        best = min(near, key=order)
    return best, _reasons(best, rows, inputs)


def _reasons(best: PredictedRun, rows: Sequence[PredictedRun], inputs: PredictionInputs) -> list[str]:
    """Return the gain of the best row over the fastest device and an equal split, and who is left out."""
    assert best.step_seconds is not None
    objective = inputs.objective
    name = " + ".join(part for part in (best.strategy, best.policy) if part is not None)
    text = f"{name}: {inputs.total} samples are predicted to take {best.step_seconds:.4g} s a step"
    others = []
    solo = [row.step_seconds or 0.0 for row in rows if row.predicted and len(row.ranks) == 1]
    equal = next((row for row in rows if row.policy == "equal" and row.predicted), None)
    several = objective == "time" and len(best.ranks) > 1
    if several and solo:
        others.append(f"{min(solo) / best.step_seconds:.2f}× as fast as the fastest device alone")
    if several and equal is not None and equal is not best and equal.step_seconds is not None:
        others.append(f"{equal.step_seconds / best.step_seconds:.2f}× as fast as an equal split")
    if objective == "energy" and best.joules_per_sample is not None:
        fastest = min((row for row in rows if row.predicted), key=lambda row: row.step_seconds or 0.0)
        longer = best.step_seconds / (fastest.step_seconds or best.step_seconds) - 1
        saved = 1 - best.joules_per_sample / (fastest.joules_per_sample or best.joules_per_sample)
        others.append(f"{saved:.1%} less energy than the fastest, in a step {longer:.1%} longer")
    if objective == "budget" and best.watts is not None:
        others.append(f"with devices that draw up to {best.watts:g} W")
    reasons = [f"{text}{', ' + ', '.join(others) if others else ''}."]
    if best.policy is None or best.policy not in inputs.policies:
        reasons += _how_to_run(best, inputs)
    choice = inputs.best()
    left_out = set(range(len(inputs.names))) - set(best.ranks)
    if best.reasons or not left_out:
        return reasons + list(best.reasons)
    if isinstance(choice, Choice) and objective == "time":
        return reasons + list(choice.reasons[:-1])
    names = ", ".join(inputs.names[rank] for rank in sorted(left_out))
    what = "it needs less energy" if objective == "energy" else "the budget is kept"
    return [*reasons, f"Without {names} {what}."]


def _how_to_run(best: PredictedRun, inputs: PredictionInputs) -> list[str]:
    """Return the command for a row that no policy gives; none if the words cannot describe its devices."""
    devices = [inputs.plan.devices[rank] for rank in best.ranks]
    if any(d.slow != 1.0 or d.limited or d.python is not None or d.host is not None for d in devices):
        return []
    names = [f"emulated:{d.card}" if d.backend == "emulated" else d.id for d in devices]
    words = f"hardware=auto hardware.devices=[{','.join(names)}] strategy={best.strategy}"
    if best.policy is not None and len(devices) > 1:
        words += f" balancing=manual balancing.weights=[{','.join(map(str, best.counts))}]"
    return [f"To train like this: {words}"]

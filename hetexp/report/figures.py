"""The figures of one run, in modelled time if it is paced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hetexp.report.runs import RunRecord


def summary_number(run: RunRecord, key: str) -> float | None:
    """Return a number of the summary, unchanged."""
    value = run.summary.get(key)
    return None if value is None else float(value)


def throughput(run: RunRecord) -> float | None:
    """Return samples a second, in modelled time if the run is paced."""
    value = summary_number(run, "samples_per_s")
    return None if value is None else value * run.scale


def step_seconds(run: RunRecord) -> float | None:
    """Return the mean time of a step, in modelled time if the run is paced."""
    value = summary_number(run, "measured_step_s")
    return None if value is None else value / run.scale


def predicted_step_seconds(run: RunRecord) -> float | None:
    """Return the predicted time of a step, in modelled time if the run is paced."""
    value = summary_number(run, "predicted_step_s")
    return None if value is None else value / run.scale


def trained_samples(run: RunRecord) -> float | None:
    """Return the run's samples, without those before a resume."""
    speed, seconds = summary_number(run, "samples_per_s"), summary_number(run, "measured_step_s")
    if run.own_steps == run.summary.get("steps") or speed is None or seconds is None or not run.own_steps:
        return summary_number(run, "samples")
    return speed * seconds * run.own_steps


def joules_per_sample(run: RunRecord) -> float | None:
    """Return the energy of all devices, in joules a sample; `None` unless every device reports its energy."""
    energy = [device.get("energy_j") for device in run.summary.get("devices", ())]
    samples = trained_samples(run)
    if not samples or not energy or None in energy:
        return None
    return sum(map(float, energy)) / samples


def energy_source(run: RunRecord) -> str | None:
    """Return the source of the devices' energy: their counters, or a model."""
    sources = [device.get("energy_source") for device in run.summary.get("devices", ())]
    return ", ".join(dict.fromkeys(str(source) for source in sources if source is not None)) or None


def train_loss(run: RunRecord) -> float | None:
    """Return the mean loss of the last log line."""
    value = run.summary["final"]["train_loss"]
    return None if value is None else float(value)


def eval_loss(run: RunRecord) -> float | None:
    """Return the loss of the last evaluation, of the merged model if there is one."""
    value = (run.summary["final"]["eval"] or {}).get("loss")
    return None if value is None else float(value)


def diverged(run: RunRecord) -> bool:
    """Return whether the last loss of training or of the evaluation is not finite."""
    return any(loss is not None and not math.isfinite(loss) for loss in (train_loss(run), eval_loss(run)))


def numbers(runs: Sequence[RunRecord], of: Callable[[RunRecord], float | None]) -> list[float]:
    """Return the value of each run that has one."""
    return [value for run in runs if (value := of(run)) is not None]

"""Runs side by side: what a report shows, as numbers.

Runs that differ in their seed only are one **variant**. Times and throughputs of paced runs are in the
devices' own, modelled time (wall-clock ÷ `time_scale`), since every run keeps a scale of its own; such runs
are marked emulated wherever they are shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetexp.core.summary import LOST_TO
from hetexp.report.runs import RunRecord, differing, settings_of

SEED = "trainer.seed"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its confidence interval by Student's t; without bounds from one seed alone."""

    mean: float
    low: float | None
    high: float | None
    count: int


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of the values and its 95 % confidence interval; None without values.

    Source: Student (1908), The probable error of a mean, Biometrika 6.
    """
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, len(values))
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * statistics.stdev(values)
    half /= math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


@dataclass(frozen=True)
class Point:
    """One logged step of a run."""

    step: int
    samples: int
    seconds: float
    """Training time until then, evaluations and checkpoints left out; modelled where the run is paced."""
    train_loss: float | None
    eval_loss: float | None
    shares: dict[str, float]
    """By device id."""


@dataclass(frozen=True)
class Variant:
    """Runs that differ in their seed only."""

    label: str
    """The settings in which the variants differ, short enough for a chart."""
    settings: dict[str, str]
    """Those settings by key."""
    runs: tuple[RunRecord, ...]
    """Completed ones, by seed."""
    emulated: bool
    valid: bool
    """False where a run was outrun by this machine: its speeds are no model's."""
    invalid_reason: str | None
    fallback: str | None
    """What ran instead of what was asked for."""
    num_devices: int
    samples_per_second: Interval | None
    step_seconds: Interval | None
    predicted_step_seconds: float | None
    efficiency: Interval | None
    ceiling: float | None
    lost_to: dict[str, float] | None
    """Means over seeds; with the efficiency they sum to 1."""
    train_loss: Interval | None
    eval_loss: Interval | None
    gain_over_equal: Interval | None
    """Throughput ÷ that of `balancing=equal` with the same other settings and seed."""
    gain_over_single: Interval | None
    """Throughput ÷ that of the fastest device alone (`Comparison.single_source`)."""
    joules_per_sample: Interval | None
    energy_source: str | None
    bytes_per_step: float | None


@dataclass(frozen=True)
class CurvePoint:
    """One split of the weights curve."""

    share: float
    """Of the curve's device, as trained."""
    samples_per_second: Interval
    label: str


@dataclass(frozen=True)
class WeightsCurve:
    """Throughput over the share of one of two devices, from runs that differ in their split."""

    device: str
    """Whose share is the axis."""
    points: tuple[CurvePoint, ...]
    """By share; policies that found a split of their own included."""
    optimum_share: float
    """Where the measured curve is highest."""
    optimum_samples_per_second: float
    predicted: tuple[tuple[float, float], ...]
    """(share, samples a second) by the cost model from what was calibrated; empty without calibration."""
    predicted_optimum_share: float | None


@dataclass(frozen=True)
class DeviceProfile:
    """What calibration measured of a device: its seconds over the samples that it is given."""

    device: str
    emulated: bool
    samples: tuple[int, ...]
    seconds: tuple[float, ...]
    """Measured, of forward and backward; in the device's own time."""
    fixed_seconds: float
    """Of the fitted line."""
    seconds_per_sample: float
    relative_speed: float
    """Of the fastest device's speed at a full share: 1 for that one."""


@dataclass(frozen=True)
class Comparison:
    """All that a report shows."""

    title: str
    keys: tuple[str, ...]
    """Settings in which the variants differ."""
    variants: tuple[Variant, ...]
    """Fastest first."""
    failed: tuple[RunRecord, ...]
    """Everything that did not complete."""
    best: Variant | None
    """The fastest of the valid ones that keep to what was asked for."""
    single_samples_per_second: float | None
    single_source: str | None
    """Where the fastest single device's throughput comes from: a run of it alone, or a calibration."""
    emulated: bool
    common: dict[str, str]
    """Settings that all runs share: group options, and what was typed."""
    curve: WeightsCurve | None = None
    """Where the runs are of two devices and differ in their split."""
    profiles: tuple[DeviceProfile, ...] = ()
    """What was measured of the devices before the runs; empty where nothing was."""
    notes: tuple[str, ...] = ()
    """What a reader must know: missing seeds, several versions, paced runs of several scales …"""


def compare(runs: Sequence[RunRecord], title: str) -> Comparison:
    """Return the comparison of these runs."""
    done = [run for run in runs if run.completed]
    keys = differing(runs, without=(SEED,))
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in done:
        settings = settings_of(run)
        groups.setdefault(tuple(settings.get(key, "–") for key in keys), []).append(run)
    single, source = _single(done)
    equal = _equal_split(groups, keys)
    variants = sorted(
        (_variant(keys, chosen, own, equal, single) for chosen, own in groups.items()),
        key=lambda one: -(one.samples_per_second.mean if one.samples_per_second else 0.0),
    )
    everyone = [settings_of(run) for run in runs]
    shared = {k: v for k, v in everyone[0].items() if all(one.get(k) == v for one in everyone)}
    return Comparison(
        title=title,
        keys=tuple(keys),
        variants=tuple(variants),
        failed=tuple(run for run in runs if not run.completed),
        best=next((one for one in variants if one.valid and one.fallback is None), None),
        single_samples_per_second=single,
        single_source=source,
        emulated=any(run.summary.get("emulated") for run in runs),
        common=shared,
    )


def throughput(run: RunRecord) -> float | None:
    """Return samples a second, in modelled time where the run is paced."""
    value = run.summary.get("samples_per_s")
    return None if value is None else float(value) * run.scale


def points(run: RunRecord) -> list[Point]:
    """Return the logged steps of a run, its clock rebuilt from the windows' own durations."""
    found: list[Point] = []
    step, samples, seconds = 0, 0, 0.0
    for line in run.metrics:
        if "step_seconds" in line:
            seconds += (line["step"] - step) * line["step_seconds"] / run.scale
            step, samples = line["step"], line["train/samples"]
        shares = {
            key.split("/")[1]: value
            for key, value in line.items()
            if key.startswith("device/") and key.endswith("/share") and value is not None
        }
        found.append(
            Point(line["step"], samples, seconds, line.get("train/loss"), line.get("eval/loss"), shares)
        )
    return found


def _single(runs: Sequence[RunRecord]) -> tuple[float | None, str | None]:
    """Return the throughput of the fastest device alone, and where that is known from."""
    alone: dict[str, list[float]] = {}
    for run in runs:
        value = throughput(run)
        if run.summary.get("world_size") == 1 and value is not None:
            alone.setdefault(run.summary["devices"][0]["name"], []).append(value)
    if alone:
        name, values = max(alone.items(), key=lambda item: statistics.fmean(item[1]))
        return statistics.fmean(values), f"runs on {name} alone"
    solo = [
        (device["solo_samples_per_s"] * run.scale, device["name"])
        for run in runs
        for device in run.summary["devices"]
        if device.get("solo_samples_per_s") is not None
    ]
    if not solo:
        return None, None
    value, name = max(solo)
    return value, f"{name} by itself, measured before or during the runs"


def _equal_split(
    groups: dict[tuple[str, ...], list[RunRecord]], keys: Sequence[str]
) -> dict[tuple[tuple[str, ...], int | None], float]:
    """Return the throughput of equal splits, by the other settings and the seed."""
    found = {}
    for chosen, own in groups.items():
        for run in own:
            value = throughput(run)
            if settings_of(run).get("balancing") == "equal" and value is not None:
                found[_others(keys, chosen), run.seed] = value
    return found


def _others(keys: Sequence[str], chosen: Sequence[str]) -> tuple[str, ...]:
    return tuple(value for key, value in zip(keys, chosen, strict=True) if not key.startswith("balancing"))


def _variant(
    keys: Sequence[str],
    chosen: Sequence[str],
    own: Sequence[RunRecord],
    equal: dict[tuple[tuple[str, ...], int | None], float],
    single: float | None,
) -> Variant:
    summaries = [run.summary for run in own]
    speeds = {run.seed: value for run in own if (value := throughput(run)) is not None}
    others = _others(keys, chosen)
    gains = [v / equal[others, seed] for seed, v in speeds.items() if (others, seed) in equal]
    losses = [one["lost_to"] for one in summaries if one["efficiency"] is not None]
    reasons = [str(one["invalid_reason"]) for one in summaries if one["invalid_reason"]]
    fallbacks = [
        f"{one['fallback']['from']} → {one['fallback']['to']}" for one in summaries if one["fallback"]
    ]
    predicted = _numbers(own, lambda run: _scaled(run, "predicted_step_s"))
    ceilings = _numbers(own, lambda run: run.summary["ceiling"])
    joules = _numbers(own, joules_per_sample)
    sent = _numbers(own, lambda run: run.summary["comm"]["bytes_per_step"])
    return Variant(
        label=", ".join(chosen) or "all runs",
        settings=dict(zip(keys, chosen, strict=True)),
        runs=tuple(sorted(own, key=lambda run: run.seed or 0)),
        emulated=any(one["emulated"] for one in summaries),
        valid=not reasons,
        invalid_reason="; ".join(dict.fromkeys(reasons)) or None,
        fallback=", ".join(dict.fromkeys(fallbacks)) or None,
        num_devices=max(len(one["devices"]) for one in summaries),
        samples_per_second=interval(list(speeds.values())),
        step_seconds=interval(_numbers(own, lambda run: _scaled(run, "measured_step_s"))),
        predicted_step_seconds=statistics.fmean(predicted) if predicted else None,
        efficiency=interval(_numbers(own, lambda run: run.summary["efficiency"])),
        ceiling=statistics.fmean(ceilings) if ceilings else None,
        lost_to={name: statistics.fmean(one[name] for one in losses) for name in LOST_TO} if losses else None,
        train_loss=interval(_numbers(own, lambda run: run.summary["final"]["train_loss"])),
        eval_loss=interval(_numbers(own, lambda run: (run.summary["final"]["eval"] or {}).get("loss"))),
        gain_over_equal=interval(gains),
        gain_over_single=interval([v / single for v in speeds.values()]) if single else None,
        joules_per_sample=interval(joules),
        energy_source=None,
        bytes_per_step=statistics.fmean(sent) if sent else None,
    )


def joules_per_sample(run: RunRecord) -> float | None:
    """Return the energy of all devices a sample, None unless every device tells its own."""
    energy = [device.get("energy_j") for device in run.summary["devices"]]
    samples = run.summary.get("samples")
    if not samples or not energy or any(one is None for one in energy):
        return None
    return float(sum(energy)) / float(samples)


def _scaled(run: RunRecord, key: str) -> float | None:
    value = run.summary.get(key)
    return None if value is None else float(value) / run.scale


def _numbers(runs: Sequence[RunRecord], of: Callable[[RunRecord], Any]) -> list[float]:
    """Return the value of each run that has one."""
    return [float(value) for run in runs if (value := of(run)) is not None]

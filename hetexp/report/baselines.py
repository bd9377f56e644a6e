"""Baselines of variants: an equal split, and the fastest device alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetexp.report.figures import throughput
from hetexp.report.runs import RunRecord
from hetexp.report.words import counted

HOW = ("strategy", "balancing", "hardware", "comm", "logger", "launch", "monitor")
"""Groups that change how work is done, but not the work."""
CALIBRATED, OWN = "calibrated before the runs", "its own work during the runs"


@dataclass(frozen=True)
class Baseline:
    """The fastest device alone, among runs of the same work."""

    device: str
    samples_per_second: float
    source: str
    """Source of that speed: runs of the device alone, a calibration, or its own work during runs."""
    by_seed: dict[int | None, float] = field(default_factory=dict)
    """Samples a second of runs of the device alone, by seed; empty without such runs."""


Work = tuple[bool, tuple[str | None, ...]]
"""Whether a run is emulated, and its settings outside `HOW`: only runs of equal work are compared."""


def work_of(run: RunRecord, keys: Sequence[str]) -> Work:
    """Return a run's work, by the settings in which the runs differ."""
    return run.emulated, tuple(run.setting(key) for key in keys if key.partition(".")[0] not in HOW)


def fastest_alone(runs: Sequence[RunRecord]) -> Baseline | None:
    """Return the fastest single device of runs of equal work.

    Runs of a device alone take precedence over a calibration, and this over its own work beside others. If
    runs of `single` exist, other runs of one device do not count: another strategy, whose policy left all
    other devices out, may cost more. Invalid runs do not count.
    """
    of_single = {
        run.device_names[0]
        for run in runs
        if run.valid and len(run.device_names) == 1 and run.summary.get("strategy") == "single"
    }
    alone: dict[str, dict[int | None, list[float]]] = {}
    beside: dict[str, dict[str, list[float]]] = {CALIBRATED: {}, OWN: {}}
    for run in runs:
        speed = throughput(run)
        if not run.valid or speed is None:
            continue
        if len(run.device_names) == 1:
            name = run.device_names[0]
            if name not in of_single or run.summary.get("strategy") == "single":
                alone.setdefault(name, {}).setdefault(run.seed, []).append(speed)
        source = CALIBRATED if run.summary.get("solo_source") == "calibration" else OWN
        for device in run.summary["devices"]:
            if device.get("solo_samples_per_s") is not None:
                solo = float(device["solo_samples_per_s"]) * run.scale
                beside[source].setdefault(device["name"], []).append(solo)
    baselines: dict[str, Baseline] = {}
    for name, seeds in alone.items():
        by_seed = {seed: statistics.fmean(speeds) for seed, speeds in seeds.items()}
        every = [speed for speeds in seeds.values() for speed in speeds]
        source = f"{counted(len(every), 'run')} of it alone"
        baselines[name] = Baseline(name, statistics.fmean(every), source, by_seed)
    for source, devices in beside.items():
        for name, speeds in devices.items():
            baselines.setdefault(name, Baseline(name, statistics.fmean(speeds), source))
    return max(baselines.values(), key=lambda baseline: baseline.samples_per_second, default=None)


def ratios_to_single(runs: Sequence[RunRecord], single: Baseline) -> list[float]:
    """Return each run's throughput ÷ the single device's with the same seed.

    Without a common seed, or without runs of the device alone, the divisor is the device's mean.
    """
    speeds = [(run.seed, speed) for run in runs if (speed := throughput(run)) is not None]
    paired = [speed / single.by_seed[seed] for seed, speed in speeds if seed in single.by_seed]
    return paired or [speed / single.samples_per_second for _, speed in speeds]


EqualSplits = dict[tuple[Work, tuple[str | None, ...], int | None], float]
"""Throughput by work, by all other settings than those of balancing, and by seed."""


def equal_splits(runs: Sequence[RunRecord], keys: Sequence[str]) -> EqualSplits:
    """Return the throughput of equal splits over several devices; the mean if a seed ran more than once."""
    speeds: dict[tuple[Work, tuple[str | None, ...], int | None], list[float]] = {}
    for run in runs:
        speed = throughput(run)
        usable = run.valid and run.fallback is None and len(run.device_names) > 1
        if usable and run.setting("balancing") == "equal" and speed is not None:
            speeds.setdefault(_key(run, keys), []).append(speed)
    return {key: statistics.fmean(values) for key, values in speeds.items()}


def ratios_to_equal(runs: Sequence[RunRecord], keys: Sequence[str], equal: EqualSplits) -> list[float]:
    """Return each run's throughput ÷ that of the equal split with the same seed, if there is one."""
    pairs = [(throughput(run), equal.get(_key(run, keys))) for run in runs]
    return [speed / base for speed, base in pairs if speed is not None and base is not None]


def _key(run: RunRecord, keys: Sequence[str]) -> tuple[Work, tuple[str | None, ...], int | None]:
    others = tuple(run.setting(key) for key in keys if key.partition(".")[0] != "balancing")
    return work_of(run, keys), others, run.seed

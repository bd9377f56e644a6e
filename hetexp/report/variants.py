"""Variants: groups of runs that differ in their seed only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hetexp.core.device import plain_name
from hetexp.core.summary import LOST_TO
from hetexp.report import figures
from hetexp.report.baselines import (
    Baseline,
    EqualSplits,
    Work,
    equal_splits,
    fastest_alone,
    ratios_to_equal,
    ratios_to_single,
    work_of,
)
from hetexp.report.intervals import interval, ratio_interval
from hetexp.report.results import Variant
from hetexp.report.runs import RunRecord

NOT_SET = "–"


def variants_of(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[Variant]:
    """Return the variants of completed runs: valid variants first, each group by speed.

    Runs of the same settings on other devices are separate variants, and so are emulated and real runs.

    Args:
        keys: settings in which the runs differ, without the seed.
    """
    works: dict[Work, list[RunRecord]] = {}
    for run in runs:
        works.setdefault(work_of(run, keys), []).append(run)
    singles = {work: fastest_alone(group) for work, group in works.items()}
    equal = equal_splits(runs, keys)
    groups = _groups(runs, keys)
    labels = _labels(groups, keys)
    variants = [
        _variant(label, keys, group, equal, singles[work_of(group[0], keys)])
        for label, group in zip(labels, groups, strict=True)
    ]
    return sorted(variants, key=lambda variant: (not variant.valid, -variant.speed))


def _groups(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[list[RunRecord]]:
    groups: dict[tuple[bool, tuple[str | None, ...]], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault((run.emulated, tuple(run.setting(key) for key in keys)), []).append(run)
    return [part for group in groups.values() for part in by_devices(group)]


def by_devices(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs grouped by their available devices, larger sets of devices first.

    A policy may leave a device out in one run only, so a run joins a group that has all of its devices.
    """
    parts: list[tuple[frozenset[str], list[RunRecord]]] = []
    for run in sorted(runs, key=lambda run: -len(set(run.device_names))):
        names = frozenset(run.device_names)
        part = next((part for available, part in parts if names <= available), None)
        if part is None:
            parts.append((names, [run]))
        else:
            part.append(run)
    return [part for _, part in parts]


def _labels(groups: Sequence[Sequence[RunRecord]], keys: Sequence[str]) -> list[str]:
    """Return a short, unique name for each group."""
    labels = [label_of(group[0], keys) for group in groups]
    for describe in (_kind, _cards):
        words = [describe(group) for group in groups]
        pairs = list(zip(labels, words, strict=True))
        labels = [
            f"{label} {word}" if len({word for other, word in pairs if other == label}) > 1 else label
            for label, word in pairs
        ]
    return labels


def label_of(run: RunRecord, keys: Sequence[str]) -> str:
    """Return the settings in which a run differs from others, in a few words."""
    leaves = [key.rpartition(".")[2] for key in keys]
    words = []
    for key, leaf in zip(keys, leaves, strict=True):
        value = run.setting(key)
        if value is None:
            continue
        name = leaf if leaves.count(leaf) == 1 else key
        words.append(value if "." not in key else f"{name}={value}")
    return ", ".join(words) or "all runs"


def _kind(group: Sequence[RunRecord]) -> str:
    return "(emulated)" if group[0].emulated else "(real)"


def _cards(group: Sequence[RunRecord]) -> str:
    return "on " + " + ".join(plain_name(name) for name in group[0].device_names)


def _variant(
    label: str,
    keys: Sequence[str],
    runs: Sequence[RunRecord],
    equal: EqualSplits,
    single: Baseline | None,
) -> Variant:
    runs = sorted(runs, key=lambda run: run.seed or 0)
    invalid = [run for run in runs if not run.valid]
    timed = [run for run in runs if run.valid] or runs
    valid = len(invalid) < len(runs)
    reasons = [str(run.summary.get("invalid_reason")) for run in invalid]
    fallbacks = [f"{swap['from']} → {swap['to']}" for run in runs if (swap := run.fallback) is not None]
    predicted = figures.numbers(timed, figures.predicted_step_seconds)
    ceilings = figures.numbers(timed, lambda run: figures.summary_number(run, "ceiling"))
    sent = figures.numbers(runs, lambda run: run.summary["comm"]["bytes_per_step"])
    samples = figures.numbers(runs, figures.trained_samples)
    sources = [source for run in timed if (source := figures.energy_source(run)) is not None]
    largest = max(runs, key=lambda run: len(run.device_names))
    single = single if valid else None
    return Variant(
        label=label,
        settings={key: NOT_SET if (value := runs[0].setting(key)) is None else value for key in keys},
        runs=tuple(runs),
        emulated=runs[0].emulated,
        valid=valid,
        invalid_reason="; ".join(dict.fromkeys(reasons)) or None,
        fallback=", ".join(dict.fromkeys(fallbacks)) or None,
        num_devices=len(largest.device_names),
        samples_per_second=interval(figures.numbers(timed, figures.throughput)),
        step_seconds=interval(figures.numbers(timed, figures.step_seconds)),
        predicted_step_seconds=statistics.fmean(predicted) if predicted else None,
        efficiency=interval(figures.numbers(timed, lambda run: figures.summary_number(run, "efficiency"))),
        ceiling=statistics.fmean(ceilings) if ceilings else None,
        lost_to=_lost_to(timed),
        train_loss=interval(_finite(figures.numbers(runs, figures.train_loss))),
        eval_loss=interval(_finite(figures.numbers(runs, figures.eval_loss))),
        gain_over_equal=ratio_interval(ratios_to_equal(timed, keys, equal)) if valid else None,
        gain_over_single=ratio_interval(ratios_to_single(timed, single)) if single else None,
        joules_per_sample=interval(figures.numbers(timed, figures.joules_per_sample)),
        energy_source=", ".join(dict.fromkeys(sources)) or None,
        bytes_per_step=_mean(sent),
        exact=all(run.exact for run in runs),
        num_diverged=sum(map(figures.diverged, runs)),
        num_invalid=len(invalid),
        single_device=single.device if single is not None else None,
        single_samples_per_second=single.samples_per_second if single is not None else None,
        single_source=single.source if single is not None else None,
        devices=largest.device_names,
        device_speeds=_device_speeds(timed),
        total_samples=_mean(samples),
    )


def _lost_to(runs: Sequence[RunRecord]) -> dict[str, float] | None:
    """Return the mean loss of speed by cause, over the runs that have an efficiency."""
    losses = [run.summary["lost_to"] for run in runs if run.summary.get("efficiency") is not None]
    if not losses:
        return None
    return {name: statistics.fmean(lost_to[name] for lost_to in losses) for name in LOST_TO}


def _device_speeds(runs: Sequence[RunRecord]) -> dict[str, float]:
    """Return each device's own speed, over the runs in which every device reports it."""
    speeds_by_name: dict[str, list[float]] = {}
    for run in runs:
        devices = run.summary["devices"]
        if all(device.get("samples_per_s") is not None for device in devices):
            for device in devices:
                name = f"{device['id']} · {device['name']}"
                speeds_by_name.setdefault(name, []).append(float(device["samples_per_s"]) * run.scale)
    return {name: statistics.fmean(speeds) for name, speeds in speeds_by_name.items()}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]

"""Notes on a comparison, which a reader must know before trusting its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hetexp.core.device import plain_name
from hetexp.report.baselines import CALIBRATED, OWN
from hetexp.report.diagram.picture import strategy_problems
from hetexp.report.figures import eval_loss
from hetexp.report.profiles import fault_of
from hetexp.report.results import Comparison, Variant
from hetexp.report.runs import RunRecord
from hetexp.report.variants import label_of
from hetexp.report.words import counted, number

FEW = 4
"""Most names in a note."""


def notes_of(comparison: Comparison) -> Iterator[str]:
    """Yield the notes, the gravest first."""
    runs = comparison.runs
    yield from _unfinished(comparison.failed)
    yield from _seeds(comparison)
    yield from _reliability(comparison.variants)
    if runs:
        yield from _emulation(runs)
        yield from _comparability(comparison.variants, runs)
        yield from _baselines(comparison)
        yield from _provenance(runs)
    yield from refused(comparison)


def refused(comparison: Comparison) -> list[str]:
    """Return why the drawing of the best plan lacks its strategy's part; empty if it is complete."""
    plan = comparison.best.runs[0].plan if comparison.best is not None else None
    return strategy_problems(plan) if plan is not None else []


def _unfinished(failed: Sequence[RunRecord]) -> Iterator[str]:
    if failed:
        statuses = Counter(run.status for run in failed)
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        yield f"{counted(len(failed), 'run')} did not complete ({counts}): they are in no figure."


def _seeds(comparison: Comparison) -> Iterator[str]:
    """Yield notes on variants that lack seeds of others, and on variants with a single seed."""
    variants = comparison.variants
    all_seeds = {run.seed for run in (*comparison.failed, *comparison.runs) if run.seed is not None}
    missing = []
    for variant in variants:
        seeds = {run.seed for run in variant.runs}
        if seeds != {None} and all_seeds - seeds:
            missing.append(f"`{variant.label}` ({', '.join(map(str, sorted(all_seeds - seeds)))})")
    labels = {variant.label for variant in variants}
    lost = {label_of(run, comparison.keys) for run in comparison.failed} - labels
    if missing:
        seeds_text = f"{counted(len(all_seeds), 'seed')} of this comparison"
        yield f"{counted(len(missing), 'variant')} without all {seeds_text}: {_few(missing)}."
    if lost and variants:
        yield f"No run completed of {_few(f'`{label}`' for label in sorted(lost))}."
    counts = {len(variant.runs) for variant in variants}
    if counts == {1}:
        yield "Each variant ran once: there are no intervals, and small differences may be chance."
    elif 1 in counts:
        once = [variant for variant in variants if len(variant.runs) == 1]
        yield f"{counted(len(once), 'variant')} ran once and have no interval: {_labels(once)}."
    twice = [variant for variant in variants if len({r.seed for r in variant.runs}) < len(variant.runs)]
    if twice and all(run.seed is not None for variant in twice for run in variant.runs):
        yield f"A seed was run more than once in {_labels(twice)}: all runs count."


def _reliability(variants: Sequence[Variant]) -> Iterator[str]:
    invalid = [variant for variant in variants if variant.num_invalid]
    if invalid:
        runs = counted(sum(variant.num_invalid for variant in invalid), "run")
        partly = [variant for variant in invalid if variant.valid]
        others = (
            f" If a variant has valid runs, its speeds are of these: {_labels(partly)}." if partly else ""
        )
        yield (
            f"Invalid: {runs}. This machine was too slow for the emulated devices at that moment, so their "
            f"times are wrong. Invalid variants are never the best, nor a baseline.{others}"
        )
    fell = [f"`{variant.label}` ({variant.fallback})" for variant in variants if variant.fallback]
    if fell:
        yield f"Not run as requested, but by `strategy.fallback`: {_few(fell)}. They are never the best."
    diverged = [f"`{v.label}` ({v.num_diverged} of {len(v.runs)})" for v in variants if v.num_diverged]
    if diverged:
        yield f"Diverged (the last loss is not finite): {_few(diverged)}. They are never the best."
    inexact = [variant for variant in variants if not variant.exact]
    if inexact:
        yield (
            f"The steps of {_labels(inexact)} are not those of one device with the global batch: compare "
            "them with the others by the loss against time, not by throughput alone."
        )


def _emulation(runs: Sequence[RunRecord]) -> Iterator[str]:
    paced = [run for run in runs if run.emulated]
    if not paced:
        return
    if len(paced) < len(runs):
        yield (
            f"Emulated: {len(paced)} of {counted(len(runs), 'run')}; the others are of real hardware. Gains "
            "are computed among runs of one kind only, and the best variant is a real one if there is any."
        )
    else:
        yield "All runs are emulated: their times are modelled, and no measurement of real devices."
    scales = [run.scale for run in paced if run.summary.get("time_scale")]
    if scales and max(scales) > 1.05 * min(scales):
        yield (
            f"Emulated runs have time scales from {number(min(scales), 3)} to {number(max(scales), 3)} (real "
            "seconds a modelled second). This machine's own costs, such as logging, weigh more in modelled "
            "time if the scale is small."
        )
    faulty = [run for run in runs if run.configured.get("fault.events")]
    if faulty:
        faults = {
            f"{device['id']}: {fault}"
            for run in faulty
            for device in run.summary["devices"]
            if (fault := fault_of(run, device["id"])) is not None
        }
        yield f"Faults were ordered in {counted(len(faulty), 'run')}: {_few(sorted(faults))}."


def _comparability(variants: Sequence[Variant], runs: Sequence[RunRecord]) -> Iterator[str]:
    for key, noun, consequence in (
        ("model", "models", "a sample is not the same work"),
        ("data", "data sets", "neither samples nor losses are the same"),
        ("global_batch", "global batch sizes", "throughputs compare, losses after as many samples do not"),
    ):
        values = _different(run.summary.get(key) for run in runs)
        if values:
            yield f"The runs have different {noun} ({_few(values)}): {consequence}."
    lengths = [run.summary.get("samples") for run in runs]
    if len(_different(lengths)) > 1:
        yield "The runs did not train on equally many samples: compare losses at the same samples or time."
    resumed = [run for run in runs if run.first_step]
    if resumed:
        yield (
            f"{counted(len(resumed), 'run')} went on from a checkpoint "
            f"({_few(f'{run.folder.name} at step {run.first_step}' for run in resumed)}): throughput and "
            "time are of the steps after it."
        )
    blind = [run for run in runs if eval_loss(run) is None]
    if blind:
        yield f"Without evaluation: {len(blind)} of {counted(len(runs), 'run')}."
    yield from _left_out(variants)
    if any(variant.efficiency is None and variant.num_devices > 1 for variant in variants):
        yield (
            "Of some variants no efficiency is known: if the model is cut, or devices share one process, the "
            "speed of each device alone has not been measured."
        )


def _left_out(variants: Sequence[Variant]) -> Iterator[str]:
    """Yield a note on variants whose policy left devices out: their efficiency ignores these."""
    all_devices: dict[str | None, set[str]] = {}
    for variant in variants:
        all_devices.setdefault(variant.runs[0].setting("hardware"), set()).update(variant.devices)
    names = []
    for variant in variants:
        left_out = all_devices[variant.runs[0].setting("hardware")] - set(variant.devices)
        if variant.efficiency is not None and left_out:
            names.append(f"`{variant.label}` ({', '.join(plain_name(name) for name in sorted(left_out))})")
    if names:
        yield f"Devices were left out in {_few(names)}: the efficiency is of the participating devices."


def _baselines(comparison: Comparison) -> Iterator[str]:
    single = [variant for variant in comparison.variants if variant.single_device is not None]
    figures = [variant for variant in single if variant.single_source in (CALIBRATED, OWN)]
    if figures:
        sources = [
            f"{plain_name(str(variant.single_device))}, {variant.single_source}" for variant in figures
        ]
        base = _few(dict.fromkeys(sources))
        bias = (
            " Its own work beside others makes a device look slower than alone."
            if any(variant.single_source == OWN for variant in figures)
            else ""
        )
        yield (
            f"No run is of the fastest device alone: gains over it use a single figure ({base}), which has "
            f"no interval.{bias}"
        )
    if len({variant.single_samples_per_second for variant in single}) > 1:
        yield "Each variant's gain is over the fastest device alone with the same work: baselines differ."


def _provenance(runs: Sequence[RunRecord]) -> Iterator[str]:
    for key in ("hetexp", "torch"):
        versions = _different(run.summary.get("versions", {}).get(key) for run in runs)
        if versions:
            yield f"The runs have different versions of {key} ({_few(versions)})."
    by_option: dict[str | None, set[str]] = {}
    for run in runs:
        by_option.setdefault(run.setting("hardware"), set()).update(run.device_names)
    if len({frozenset(names) for names in by_option.values()}) > 1:
        listed = _few(sorted({plain_name(name) for names in by_option.values() for name in names}))
        yield f"The runs are not all of the same devices ({listed}): the table says which."
    measured = _different((run.summary.get("calibration") or {}).get("measured_at") for run in runs)
    if len(measured) > 1:
        yield (
            f"The devices were measured {len(measured)} times: profiles are of one of these measurements, "
            "and the policies of the runs used different figures."
        )


def _different(values: Iterable[object]) -> list[str]:
    """Return the known values as text if there are several."""
    texts = list(dict.fromkeys(f"{value}" for value in values if value is not None))
    return texts if len(texts) > 1 else []


def _labels(variants: Iterable[Variant]) -> str:
    return _few(f"`{variant.label}`" for variant in variants)


def _few(names: Iterable[str]) -> str:
    """Return some of the names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - FEW} more" if len(listed) > FEW else ""
    return ", ".join(listed[:FEW]) + more

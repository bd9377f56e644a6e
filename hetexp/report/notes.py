"""What a reader of a comparison must know before the figures are believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hetexp.report.baselines import CALIBRATED, OWN
from hetexp.report.diagram.picture import strategy_problems
from hetexp.report.figures import eval_loss
from hetexp.report.profiles import fault_of
from hetexp.report.results import Comparison, Variant
from hetexp.report.runs import RunRecord
from hetexp.report.variants import label_of, plain
from hetexp.report.words import counted, number

FEW = 4
"""Names that a note gives."""


def notes_of(comparison: Comparison) -> Iterator[str]:
    """Yield one note a matter, the gravest first."""
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
    """Return why the drawing of the best plan lacks its strategy's part, if it does."""
    plan = comparison.best.runs[0].plan if comparison.best is not None else None
    return strategy_problems(plan) if plan is not None else []


def _unfinished(failed: Sequence[RunRecord]) -> Iterator[str]:
    ways = Counter(run.status for run in failed)
    if ways:
        counts = ", ".join(f"{count} {status}" for status, count in ways.items())
        yield f"{counted(len(failed), 'run')} did not complete ({counts}): no figure is of these."


def _seeds(comparison: Comparison) -> Iterator[str]:
    """Name variants that lack seeds of others, and variants with a single seed."""
    variants = comparison.variants
    wanted = {run.seed for run in (*comparison.failed, *comparison.runs) if run.seed is not None}
    missing = []
    for variant in variants:
        seeds = {run.seed for run in variant.runs}
        if seeds != {None} and wanted - seeds:
            missing.append(f"`{variant.label}` ({', '.join(map(str, sorted(wanted - seeds)))})")
    labels = {variant.label for variant in variants}
    lost = {label_of(run, comparison.keys) for run in comparison.failed} - labels
    if missing:
        all_seeds = f"{counted(len(wanted), 'seed')} of this comparison"
        yield f"{counted(len(missing), 'variant')} without all {all_seeds}: {_few(missing)}."
    if lost and variants:
        yield f"No run completed of {_few(f'`{label}`' for label in sorted(lost))}."
    counts = {len(variant.runs) for variant in variants}
    if counts == {1}:
        yield "Each variant ran once: no interval is known, and small differences may be chance."
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
        left = (
            f" Where a variant has valid ones, its speeds are of these: {_labels(partly)}." if partly else ""
        )
        yield (
            f"Invalid: {runs}. This machine was too slow for the emulated devices at that moment: times are "
            f"not theirs. They are never the best, and nothing is compared with them.{left}"
        )
    fell = [f"`{variant.label}` ({variant.fallback})" for variant in variants if variant.fallback]
    if fell:
        yield f"Not run as asked for, but by `strategy.fallback`: {_few(fell)}. They are never the best."
    diverged = [f"`{v.label}` ({v.num_diverged} of {len(v.runs)})" for v in variants if v.num_diverged]
    if diverged:
        yield f"Diverged, the last loss is not finite: {_few(diverged)}. They are never the best."
    inexact = [variant for variant in variants if not variant.exact]
    if inexact:
        yield (
            f"The steps of {_labels(inexact)} are not those of one device with the global batch: throughput "
            "alone does not compare them with the others, the loss against time does."
        )


def _emulation(runs: Sequence[RunRecord]) -> Iterator[str]:
    paced = [run for run in runs if run.emulated]
    if not paced:
        return
    if len(paced) < len(runs):
        yield (
            f"Emulated: {len(paced)} of {counted(len(runs), 'run')}; the others are of real hardware. Gains "
            "are computed among runs of one kind only, and the best is one of the real ones where it can be."
        )
    else:
        yield "All runs are emulated: their times are modelled, and no measurement of real devices."
    scales = [run.scale for run in paced if run.summary.get("time_scale")]
    if scales and max(scales) > 1.05 * min(scales):
        yield (
            f"Emulated runs have time scales from {number(min(scales), 3)} to {number(max(scales), 3)} (real "
            "seconds a modelled one). What this machine adds to a step, such as logging, weighs more in "
            "modelled time where the scale is small."
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
    for key, what, so in (
        ("model", "models", "a sample is not the same work"),
        ("data", "data sets", "neither samples nor losses are the same"),
        ("global_batch", "global batch sizes", "throughputs compare, losses after as many samples do not"),
    ):
        values = _different(run.summary.get(key) for run in runs)
        if values:
            yield f"The runs have different {what} ({_few(values)}): {so}."
    lengths = [run.summary.get("samples") for run in runs]
    if len(_different(lengths)) > 1:
        yield "The runs did not train on equally many samples: compare losses at the same samples or time."
    resumed = [run for run in runs if run.first_step]
    if resumed:
        yield (
            f"{counted(len(resumed), 'run')} went on from a checkpoint "
            f"({_few(f'{run.folder.name} at step {run.first_step}' for run in resumed)}): throughput and "
            "time are of what came after it."
        )
    blind = [run for run in runs if eval_loss(run) is None]
    if blind:
        yield f"Without evaluation: {len(blind)} of {counted(len(runs), 'run')}."
    yield from _left_out(variants)
    if any(variant.efficiency is None and variant.num_devices > 1 for variant in variants):
        yield (
            "Of some variants no efficiency is known: of a model that is cut, or of devices that share one "
            "process, what each would do alone has not been measured."
        )


def _left_out(variants: Sequence[Variant]) -> Iterator[str]:
    """Name variants whose policy left devices out: the efficiency does not count these."""
    every: dict[str | None, set[str]] = {}
    for variant in variants:
        every.setdefault(variant.runs[0].setting("hardware"), set()).update(variant.devices)
    names = []
    for variant in variants:
        lacks = every[variant.runs[0].setting("hardware")] - set(variant.devices)
        if variant.efficiency is not None and lacks:
            names.append(f"`{variant.label}` ({', '.join(plain(name) for name in sorted(lacks))})")
    if names:
        yield f"Devices were left out in {_few(names)}: the efficiency there is of those that took part."


def _baselines(comparison: Comparison) -> Iterator[str]:
    single = [variant for variant in comparison.variants if variant.single_device is not None]
    figures = [variant for variant in single if variant.single_source in (CALIBRATED, OWN)]
    if figures:
        sources = [f"{plain(str(variant.single_device))}, {variant.single_source}" for variant in figures]
        base = _few(dict.fromkeys(sources))
        low = (
            " Its own work beside others makes a device look slower than alone."
            if any(variant.single_source == OWN for variant in figures)
            else ""
        )
        yield (
            f"No run is of the fastest device alone: gains over it are ÷ one figure of it ({base}), which "
            f"has no interval of its own.{low}"
        )
    if len({variant.single_samples_per_second for variant in single}) > 1:
        yield "Each variant's gain is over the fastest device alone with the same work, not over one for all."


def _provenance(runs: Sequence[RunRecord]) -> Iterator[str]:
    for key in ("hetexp", "torch"):
        versions = _different(run.summary.get("versions", {}).get(key) for run in runs)
        if versions:
            yield f"The runs have different versions of {key} ({_few(versions)})."
    by_option: dict[str | None, set[str]] = {}
    for run in runs:
        by_option.setdefault(run.setting("hardware"), set()).update(run.device_names)
    cards = [frozenset(names) for names in by_option.values()]
    apart = len(set(cards)) > 1
    if apart:
        listed = _few(sorted({plain(name) for names in cards for name in names}))
        yield f"The runs are not all of the same devices ({listed}): the table says which."
    measured = _different((run.summary.get("calibration") or {}).get("measured_at") for run in runs)
    if len(measured) > 1:
        yield (
            f"The devices were measured {len(measured)} times: a device's profile is of one of them, and the "
            "policies of the runs saw different figures."
        )


def _different(values: Iterable[object]) -> list[str]:
    """Return the known values as text if there are several."""
    known = list(dict.fromkeys(f"{value}" for value in values if value is not None))
    return known if len(known) > 1 else []


def _labels(variants: Iterable[Variant]) -> str:
    return _few(f"`{variant.label}`" for variant in variants)


def _few(names: Iterable[str]) -> str:
    """Return some of the names, and how many more there are."""
    known = list(names)
    more = f" and {len(known) - FEW} more" if len(known) > FEW else ""
    return ", ".join(known[:FEW]) + more

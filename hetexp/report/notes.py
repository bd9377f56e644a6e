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


def notes_of(found: Comparison) -> Iterator[str]:
    """Yield one note a matter, the gravest first."""
    runs = [run for one in found.variants for run in one.runs]
    yield from _unfinished(found.failed)
    yield from _seeds(found)
    yield from _reliability(found.variants)
    if runs:
        yield from _emulation(runs)
        yield from _comparability(found.variants, runs)
        yield from _baselines(found)
        yield from _provenance(runs)
    yield from refused(found)


def refused(found: Comparison) -> list[str]:
    """Return why the drawing of the best plan lacks its strategy's part, if it does."""
    plan = found.best.runs[0].plan if found.best is not None else None
    return strategy_problems(plan) if plan is not None else []


def _unfinished(failed: Sequence[RunRecord]) -> Iterator[str]:
    ways = Counter(run.status for run in failed)
    if ways:
        counts = ", ".join(f"{count} {status}" for status, count in ways.items())
        yield f"{counted(len(failed), 'run')} did not complete ({counts}): no figure is of these."


def _seeds(found: Comparison) -> Iterator[str]:
    """Say where seeds are missing that other variants have, and where there is one alone."""
    everyone = [*found.failed, *(run for one in found.variants for run in one.runs)]
    wanted = {run.seed for run in everyone if run.seed is not None}
    missing = [
        f"`{one.label}` ({', '.join(map(str, sorted(lacks)))})"
        for one in found.variants
        if (lacks := wanted - {run.seed for run in one.runs}) and any(r.seed is not None for r in one.runs)
    ]
    lost = {label_of(run, found.keys) for run in found.failed} - {one.label for one in found.variants}
    if missing:
        seeds = f"{counted(len(wanted), 'seed')} of this comparison"
        yield f"{counted(len(missing), 'variant')} without all {seeds}: {_few(missing)}."
    if lost and found.variants:
        yield f"No run completed of {_few(f'`{label}`' for label in sorted(lost))}."
    counts = {len(one.runs) for one in found.variants}
    if counts == {1}:
        yield "Each variant ran once: no interval is known, and small differences may be chance."
    elif 1 in counts:
        once = [f"`{one.label}`" for one in found.variants if len(one.runs) == 1]
        yield f"{counted(len(once), 'variant')} ran once and have no interval: {_few(once)}."
    twice = [one for one in found.variants if len({run.seed for run in one.runs}) < len(one.runs)]
    if twice and all(run.seed is not None for one in twice for run in one.runs):
        yield f"A seed was run more than once in {_few(f'`{one.label}`' for one in twice)}: all runs count."


def _reliability(variants: Sequence[Variant]) -> Iterator[str]:
    invalid = [one for one in variants if one.num_invalid]
    if invalid:
        runs = counted(sum(one.num_invalid for one in invalid), "run")
        partly = [f"`{one.label}`" for one in invalid if one.valid]
        left = f" Where a variant has valid ones, its speeds are of these: {_few(partly)}." if partly else ""
        yield (
            f"Invalid: {runs}. This machine was too slow for the emulated devices at that moment: times are "
            f"not theirs. They are never the best, and nothing is compared with them.{left}"
        )
    fell = [f"`{one.label}` ({one.fallback})" for one in variants if one.fallback]
    if fell:
        yield f"Not run as asked for, but by `strategy.fallback`: {_few(fell)}. They are never the best."
    diverged = [
        f"`{one.label}` ({one.num_diverged} of {len(one.runs)})" for one in variants if one.num_diverged
    ]
    if diverged:
        yield f"Diverged, the last loss is not finite: {_few(diverged)}. They are never the best."
    other = [f"`{one.label}`" for one in variants if not one.exact]
    if other:
        yield (
            f"The steps of {_few(other)} are not those of one device with the global batch: throughput alone "
            "does not compare them with the others, the loss against time does."
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
    if any(one.efficiency is None and one.num_devices > 1 for one in variants):
        yield (
            "Of some variants no efficiency is known: of a model that is cut, or of devices that share one "
            "process, what each would do alone has not been measured."
        )


def _left_out(variants: Sequence[Variant]) -> Iterator[str]:
    """Say where a policy left devices out: the efficiency does not count what these could have done."""
    every: dict[str | None, set[str]] = {}
    for one in variants:
        every.setdefault(one.runs[0].setting("hardware"), set()).update(one.devices)
    names = [
        f"`{one.label}` ({', '.join(plain(name) for name in sorted(lacks))})"
        for one in variants
        if one.efficiency is not None and (lacks := every[one.runs[0].setting("hardware")] - set(one.devices))
    ]
    if names:
        yield f"Devices were left out in {_few(names)}: the efficiency there is of those that took part."


def _baselines(found: Comparison) -> Iterator[str]:
    single = [one for one in found.variants if one.single_device is not None]
    figures = [one for one in single if one.single_source in (CALIBRATED, OWN)]
    if figures:
        base = _few(dict.fromkeys(f"{plain(str(one.single_device))}, {one.single_source}" for one in figures))
        low = (
            " Its own work beside others makes a device look slower than alone."
            if any(one.single_source == OWN for one in figures)
            else ""
        )
        yield (
            f"No run is of the fastest device alone: gains over it are ÷ one figure of it ({base}), which "
            f"has no interval of its own.{low}"
        )
    if len({one.single_samples_per_second for one in single}) > 1:
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
    """Return the values that are known, as text, where there are several."""
    known = list(dict.fromkeys(f"{value}" for value in values if value is not None))
    return known if len(known) > 1 else []


def _few(names: Iterable[str]) -> str:
    """Return some of the names, and how many more there are."""
    known = list(names)
    more = f" and {len(known) - FEW} more" if len(known) > FEW else ""
    return ", ".join(known[:FEW]) + more

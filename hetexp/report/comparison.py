"""Runs side by side: from their records to what a report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.core.sweep.folder import of_a_run
from hetexp.report.answer import answer_of
from hetexp.report.notes import notes_of
from hetexp.report.profiles import profiles_of
from hetexp.report.results import Comparison, Variant
from hetexp.report.runs import RunRecord, differing
from hetexp.report.variants import plain, variants_of
from hetexp.report.weights_curve import curve_of

SEED = "trainer.seed"
NO_SETTING = (SEED, "resume", "name", "plan_only", "hardware.time_scale")
"""Keys that make no variant of their own: what they change is not compared, or is taken out."""


def compare(runs: Sequence[RunRecord], title: str) -> Comparison:
    """Return the comparison of these runs.

    Args:
        runs: one or more, as `read_runs` returns them.
    """
    done = [run for run in runs if run.completed]
    keys = differing(runs, without=NO_SETTING)
    variants = variants_of(done, keys)
    able = candidates(variants)
    best = next((variant for variant in able if variant.exact), next(iter(able), None))
    compared = best if best is not None else next(iter(variants), None)
    comparison = Comparison(
        title=title,
        keys=tuple(keys),
        variants=tuple(variants),
        failed=tuple(run for run in runs if not run.completed),
        best=best,
        single_samples_per_second=compared.single_samples_per_second if compared is not None else None,
        single_source=_source(compared),
        emulated=any(run.emulated for run in runs),
        common=_common(runs),
        curve=curve_of(variants, keys),
        profiles=profiles_of([run for variant in able or variants for run in variant.runs] or done),
    )
    comparison = replace(comparison, notes=tuple(notes_of(comparison)))
    return replace(comparison, answer=answer_of(comparison, able))


def _source(variant: Variant | None) -> str | None:
    if variant is None or variant.single_device is None:
        return None
    return f"{plain(variant.single_device)}, {variant.single_source}"


def candidates(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that can be the best, the fastest first.

    Real and emulated runs are never compared: if there are real ones, only these are returned.
    """
    able = [variant for variant in variants if variant.can_be_best]
    return [variant for variant in able if not variant.emulated] or able


def _common(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the settings that all runs share; of runs without plan nothing is known but what was typed."""
    known = [run for run in runs if run.plan is not None] or list(runs)
    keys = dict.fromkeys(key for run in known for key in run.settings)
    shared = {}
    for key in keys:
        values = {run.setting(key) for run in known}
        value = values.pop()
        if not values and value is not None and of_a_run([key]):
            shared[key] = value
    return shared

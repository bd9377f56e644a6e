"""The comparison of runs: from their records to the content of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.core.device import plain_name
from hetexp.core.sweep.folder import of_a_run
from hetexp.report.answer import answer_of
from hetexp.report.notes import notes_of
from hetexp.report.profiles import profiles_of
from hetexp.report.results import Comparison, Variant
from hetexp.report.runs import RunRecord, differing
from hetexp.report.variants import variants_of
from hetexp.report.weights_curve import curve_of

SEED = "trainer.seed"
NO_SETTING = (SEED, "resume", "name", "plan_only", "hardware.time_scale")
"""Keys that do not separate variants: their effect is not compared, or figures are corrected for it."""


def compare(runs: Sequence[RunRecord], title: str) -> Comparison:
    """Return the comparison of these runs.

    Args:
        runs: at least one, as `read_runs` returns them.
    """
    completed = [run for run in runs if run.completed]
    keys = differing(runs, without=NO_SETTING)
    variants = variants_of(completed, keys)
    eligible = candidates(variants)
    best = next((variant for variant in eligible if variant.exact), next(iter(eligible), None))
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
        profiles=profiles_of([run for variant in eligible or variants for run in variant.runs] or completed),
    )
    comparison = replace(comparison, notes=tuple(notes_of(comparison)))
    return replace(comparison, answer=answer_of(comparison, eligible))


def _source(variant: Variant | None) -> str | None:
    if variant is None or variant.single_device is None:
        return None
    return f"{plain_name(variant.single_device)}, {variant.single_source}"


def candidates(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that can be the best, the fastest first.

    Real and emulated runs are never compared: if there are real ones, only these are returned.
    """
    able = [variant for variant in variants if variant.can_be_best]
    return [variant for variant in able if not variant.emulated] or able


def _common(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the settings that all runs share; only the typed settings are known of runs without plan."""
    planned = [run for run in runs if run.plan is not None] or list(runs)
    keys = dict.fromkeys(key for run in planned for key in run.settings)
    shared = {}
    for key in keys:
        values = {run.setting(key) for run in planned}
        value = values.pop()
        if not values and value is not None and of_a_run([key]):
            shared[key] = value
    return shared

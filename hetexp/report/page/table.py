"""The table of variants on the report's page: its columns, cells and marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetexp.report.charts.svg import bounds, deviation, percent
from hetexp.report.results import Comparison, Interval, Variant
from hetexp.report.words import number, seconds

EMULATED = "Emulated devices: arithmetic is real, speed is modelled. No number here is hardware's."
INVALID = "This machine was too slow to emulate the cards: the variant's speeds are not theirs."


@dataclass(frozen=True)
class Cell:
    """A cell of the table."""

    text: str
    value: float | None = None
    """Sort key of its row; `None` comes last."""
    beside: str = ""
    """Small text below the value."""


@dataclass(frozen=True)
class Column:
    """A column of the table of variants."""

    name: str
    about: str
    of: Callable[[Variant], Cell]


NOTHING = Cell("", None)
"""The cell of an unknown figure."""
BEST = "The fastest valid variant that ran as requested; those whose steps are one device's take precedence."


def marks(comparison: Comparison, variant: Variant) -> list[tuple[str, str, str]]:
    """Return the marks of a variant: text, class and meaning of each."""
    result = []
    if variant is comparison.best and len(comparison.variants) > 1:
        result.append(("best", "good", BEST))
    if not variant.valid:
        result.append(("! invalid", "bad", variant.invalid_reason or INVALID))
    elif variant.num_invalid:
        text = f"! {variant.num_invalid} of {len(variant.runs)} invalid"
        result.append((text, "warn", "Its speeds are those of the valid runs alone."))
    if variant.num_diverged:
        text = f"! {variant.num_diverged} of {len(variant.runs)} diverged"
        result.append((text, "bad", "The last loss is not finite; means of losses leave these runs out."))
    if variant.fallback is not None:
        about = "Another strategy ran than the requested one."
        result.append((f"fallback {variant.fallback}", "warn", about))
    if not variant.exact:
        result.append(("not exact", "plain", "Its steps are not those of one device on the whole batch."))
    if variant.emulated:
        result.append(("emulated", "plain", EMULATED))
    return result


def explained(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return each kind of mark in the table once."""
    kinds: dict[str, tuple[str, str, str]] = {}
    for variant in comparison.variants:
        for text, kind, about in marks(comparison, variant):
            about = INVALID if text == "! invalid" else about
            kinds.setdefault(_short(text), (_short(text), kind, about))
    return list(kinds.values())


def _short(mark: str) -> str:
    """Return a mark without its variant's numbers and names."""
    words = mark.split()
    if words[0] == "fallback":
        return words[0]
    return {"invalid": "! partly invalid", "diverged": "! diverged"}[words[-1]] if "of" in words else mark


def invalid(comparison: Comparison) -> list[tuple[str, str]]:
    """Return number with label, and the reason, of each invalid variant."""
    return [
        (f"{place} {variant.label}", variant.invalid_reason or INVALID)
        for place, variant in enumerate(comparison.variants, 1)
        if variant.num_invalid or not variant.valid
    ]


def _measured(
    value: Interval | None, write: Callable[[float], str], write_bounds: Callable[[float], str] | None = None
) -> Cell:
    if value is None:
        return NOTHING
    return Cell(write(value.mean), value.mean, bounds(value, write_bounds or write))


def _speed(variant: Variant) -> Cell:
    return _measured(variant.samples_per_second, partial(number, digits=4), partial(number, digits=2))


def _efficiency(variant: Variant) -> Cell:
    cell = _measured(variant.efficiency, percent)
    if variant.ceiling is None or variant.efficiency is None:
        return cell
    half = cell.beside.removesuffix(" %")
    return replace(cell, beside=" · ".join(part for part in (half, f"of {percent(variant.ceiling)}") if part))


def _predicted(variant: Variant) -> Cell:
    model, step = variant.predicted_step_seconds, variant.step_seconds
    if model is None:
        return NOTHING
    return Cell(seconds(model), model, "" if step is None else deviation(step.mean, model))


def columns(variants: Sequence[Variant]) -> list[Column]:
    """Return the columns for which at least one variant has a value."""
    all_columns = [
        Column("samples\u00a0/\u00a0s", "Mean over seeds and its 95 % confidence interval", _speed),
        Column("vs equal split", "Gain over the equal split", lambda v: _measured(v.gain_over_equal, _times)),
        Column(
            "vs fastest device",
            "Gain over the fastest device alone",
            lambda v: _measured(v.gain_over_single, _times),
        ),
        Column("efficiency", "Of the devices' own speeds together; of what can be reached", _efficiency),
        Column("step", "Measured time of a step", lambda v: _measured(v.step_seconds, seconds)),
        Column("predicted", "Predicted time of a step; below it measured ÷ predicted − 1", _predicted),
        Column("train loss", "Last one logged", lambda v: _measured(v.train_loss, number)),
        Column("eval loss", "At the end", lambda v: _measured(v.eval_loss, number)),
        Column(
            "J / sample", "Energy of all devices a sample", lambda v: _measured(v.joules_per_sample, number)
        ),
        Column("seeds", "Runs", lambda v: Cell(str(len(v.runs)), len(v.runs))),
    ]
    filled = {column.name for column in all_columns if any(column.of(variant).text for variant in variants)}
    if all(variant.eval_loss is not None for variant in variants):
        filled.discard("train loss")
    return [column for column in all_columns if column.name in filled]


def _times(value: float) -> str:
    return f"{value:.2f}×"

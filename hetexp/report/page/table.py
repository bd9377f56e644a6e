"""The table of variants on the report's page: its columns, its marks, its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetexp.report.charts.svg import bounds, deviation, number, percent, seconds
from hetexp.report.results import Comparison, Interval, Variant

EMULATED = "Emulated devices: arithmetic is real, speed is modelled. No number here is hardware's."
INVALID = "This machine could not keep the emulated cards' pace: the variant's speeds are no card's."


@dataclass(frozen=True)
class Cell:
    """What a table shows of a variant."""

    text: str
    value: float | None = None
    """By which rows are sorted; None comes last."""
    beside: str = ""
    """In small type below it."""


@dataclass(frozen=True)
class Column:
    """A column of the table of variants."""

    name: str
    about: str
    of: Callable[[Variant], Cell]


NOTHING = Cell("", None)
"""A variant of which a figure is not known."""


BEST = (
    "The fastest of the valid variants that keep to what was asked for, and whose steps are those of one "
    "device where any are."
)


def marks(comparison: Comparison, variant: Variant) -> list[tuple[str, str, str]]:
    """Return the marks of a variant: text, class, and what it means."""
    found = []
    if variant is comparison.best and len(comparison.variants) > 1:
        found.append(("best", "good", BEST))
    if not variant.valid:
        found.append(("! invalid", "bad", variant.invalid_reason or INVALID))
    elif variant.num_invalid:
        text = f"! {variant.num_invalid} of {len(variant.runs)} invalid"
        found.append((text, "warn", "Its speeds are those of the valid runs alone."))
    if variant.num_diverged:
        text = f"! {variant.num_diverged} of {len(variant.runs)} diverged"
        found.append((text, "bad", "The last loss is not finite; means of losses leave these runs out."))
    if variant.fallback is not None:
        found.append((f"fallback {variant.fallback}", "warn", "Another strategy ran than the one asked for."))
    if not variant.exact:
        found.append(("not exact", "plain", "Its steps are not those of one device on the whole batch."))
    if variant.emulated:
        found.append(("emulated", "plain", EMULATED))
    return found


def explained(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return each kind of mark that the table has, once."""
    found: dict[str, tuple[str, str, str]] = {}
    for variant in comparison.variants:
        for text, kind, about in marks(comparison, variant):
            about = INVALID if text == "! invalid" else about
            found.setdefault(_short(text), (_short(text), kind, about))
    return list(found.values())


def _short(mark: str) -> str:
    """Return a mark without what is its variant's own."""
    words = mark.split()
    if words[0] == "fallback":
        return words[0]
    return {"invalid": "! partly invalid", "diverged": "! diverged"}[words[-1]] if "of" in words else mark


def invalid(comparison: Comparison) -> list[tuple[str, str]]:
    """Return number and label, and the reason, of each invalid variant."""
    return [
        (f"{place} {one.label}", one.invalid_reason or INVALID)
        for place, one in enumerate(comparison.variants, 1)
        if one.num_invalid or not one.valid
    ]


def _measured(found: Interval | None, write: Callable[[float], str]) -> Cell:
    if found is None:
        return NOTHING
    return Cell(write(found.mean), found.mean, bounds(found, write))


def _speed(variant: Variant) -> Cell:
    found = variant.samples_per_second
    if found is None:
        return NOTHING
    return Cell(number(found.mean, 4), found.mean, bounds(found, lambda value: number(value, 2)))


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
    """Return the columns of which at least one variant knows a value."""
    every = [
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
    known = {column.name for column in every if any(column.of(one).text for one in variants)}
    if all(one.eval_loss is not None for one in variants):
        known.discard("train loss")
    return [column for column in every if column.name in known]


def _times(value: float) -> str:
    return f"{value:.2f}×"

"""The figures of the report's page, with their captions and legends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetexp.core.summary import LOST_TO
from hetexp.report.charts import bars as charts_bars
from hetexp.report.charts import lines as charts_lines
from hetexp.report.charts.bars import Bar, Part, Row
from hetexp.report.charts.lines import Line, Spot
from hetexp.report.charts.svg import bounds, deviation, tick, tick_seconds
from hetexp.report.page.data import Drawn, device_names, profile_names
from hetexp.report.results import Comparison, Interval
from hetexp.report.words import number, seconds

FULL, HALF, PHONE = 1000.0, 470.0, 322.0
"""Widths of figures, in CSS pixels."""
LOSS_RANGE = 50.0
"""Largest ÷ smallest loss from which its axis is logarithmic."""
MOST_BANDS = 4
"""Most variants with bands over their seeds: more bands would cover each other."""
SAME_LOSS = 0.02
"""Relative difference below which two loss curves count as equal."""
PARTS = {"efficiency": "useful", **{name: name for name in LOST_TO}}
"""Segments of the devices' own speed → classes of their colours."""
NUM_DEVICE_COLOURS = 8


@dataclass(frozen=True)
class Figure:
    """A chart with its caption, heading and legend."""

    id: str
    caption: str
    draw: Callable[[float], str]
    """Returns SVG for a width."""
    emulated: bool
    full: bool = True
    """Whether it takes the whole width; others stand two in a row."""
    name: str = ""
    """Heading, if several figures share a section."""
    legend: Sequence[tuple[str, str]] = ()
    """Classes of colours, and their meanings."""
    live: str | None = None
    """Axis of the interactive chart that replaces it on a screen: `samples` or `seconds`."""

    @property
    def wide(self) -> str:
        """SVG for a screen and for paper."""
        return self.draw(FULL if self.full else HALF)

    @property
    def narrow(self) -> str:
        """SVG for a phone."""
        return self.draw(PHONE)


def figure(
    id_: str, caption: str, shown: Sequence[Drawn], draw: Callable[[float], str], **layout: Any
) -> Figure:
    """Return a figure of these variants; if only some are emulated, its caption explains their look.

    Args:
        layout: further fields of `Figure`.
    """
    emulated = [drawn.variant.emulated for drawn in shown]
    if any(emulated) and not all(emulated):
        caption = f"{caption} Hatched and hollow: emulated variants.".strip()
    return Figure(id_, caption, draw, any(emulated), **layout)


def row(drawn: Drawn) -> Row:
    """Return the label and look of a variant's row in a chart."""
    variant = drawn.variant
    return Row(drawn.name, drawn.number, drawn.colour, variant.emulated, not variant.valid)


def with_interval(value: Interval, digits: int = 4) -> str:
    """Return a mean with its interval: 131,400 ± 1,200."""
    return f"{number(value.mean, digits)} {bounds(value, lambda end: number(end, 2))}".rstrip()


def bars(shown: Sequence[Drawn], field: str, digits: int = 4, unit: str = "") -> list[Bar]:
    """Return a bar, with its interval, for each variant that has a value in a field of `Variant`."""
    values = [(drawn, getattr(drawn.variant, field)) for drawn in shown]
    return [
        Bar(row(drawn), value.mean, value.low, value.high, with_interval(value, digits) + unit)
        for drawn, value in values
        if value is not None
    ]


def throughput(comparison: Comparison, shown: Sequence[Drawn]) -> Figure | None:
    """Return samples a second of each variant, and of the fastest device alone as a line."""
    speeds = bars(shown, "samples_per_second")
    if not speeds:
        return None
    single = comparison.single_samples_per_second
    line = None if single is None else (single, "Fastest device alone")
    title = "Samples a second of each variant"
    caption = "Longer is faster."
    if any(bar.low is not None for bar in speeds):
        caption += " Whiskers: 95 % confidence interval over seeds."
    if any(bar.row.invalid for bar in speeds):
        caption += " Pale: invalid, this machine was too slow to emulate it."
    if line:
        caption += f" Dashed line: {comparison.single_source}."
    draw = partial(charts_bars.bars, speeds, title=title, axis="samples / s", reference=line)
    return figure("throughput", caption, shown, draw)


def lost(shown: Sequence[Drawn]) -> Figure | None:
    """Return useful and lost parts of the devices' own speeds, a stack for each variant."""
    stacks = []
    for drawn in shown:
        variant = drawn.variant
        if variant.efficiency is not None and variant.lost_to is not None:
            parts = {"efficiency": variant.efficiency.mean, **variant.lost_to}
            segments = [Part(name, value, PARTS[name], name == "other") for name, value in parts.items()]
            stacks.append((row(drawn), segments))
    if not stacks:
        return None
    caption = "100 % is the sum of the devices' speeds alone; the segments of a row add up to it."
    if any(segment.value < -0.005 for _, segments in stacks for segment in segments):
        caption += (
            " A segment left of 0 is negative: the run was quicker than the measured speeds predict, and the"
            " segments right of 0 exceed 100 % by as much."
        )
    axis = "of the devices' own speeds together"
    draw = partial(charts_bars.stacked, stacks, title="Where the devices' speed went", axis=axis)
    return figure("lost", caption, shown, draw, legend=[(PARTS[name], name) for name in PARTS])


def gains(shown: Sequence[Drawn]) -> Figure | None:
    """Return the gain over the equal split and over the fastest device alone."""
    fields = {"over the equal split": "gain_over_equal", "over the fastest device": "gain_over_single"}
    dots = {name: bars(shown, field) for name, field in fields.items()}
    panels = [(name, gain) for name, gain in dots.items() if any(abs(dot.value - 1) > 1e-9 for dot in gain)]
    if not panels or len(shown) < 2:
        return None
    caption = "Throughput divided by that of the same settings and seed with an equal split"
    if len(panels) == 2:
        caption += ", and by that of the fastest device alone"
    elif panels[0][0] == "over the fastest device":
        caption = "Throughput divided by that of the fastest device alone"
    caption += ". Right of 1 is faster."
    return figure("gain", caption, shown, partial(charts_bars.dots, panels, title="Gain of each variant"))


def loss(shown: Sequence[Drawn]) -> list[Figure]:
    """Return the losses against samples, and against time."""
    logged = [drawn for drawn in shown if drawn.train or drawn.eval]
    if not any(drawn.train and len(drawn.train.steps) > 1 or drawn.eval for drawn in logged):
        return []
    values = [v for drawn in logged for curve in (drawn.train, drawn.eval) if curve for v in curve.mean]
    log = min(values) > 0 and max(values) / min(values) > LOSS_RANGE
    bands = len(logged) <= MOST_BANDS and any(drawn.train and drawn.train.low for drawn in logged)
    about_samples = "Lines: training loss; dots: evaluation."
    if any(len(drawn.variant.runs) > 1 for drawn in logged):
        about_samples += " Means over seeds" + (", bands from the lowest to the highest." if bands else ".")
    if _coincide(logged):
        about_samples += " Exact strategies take the same steps, so their curves coincide."
    figures = []
    about_time = "The same losses: they show what remains of a gain in samples a second."
    for axis, name, unit, write, caption in (
        ("samples", "Against samples", "samples trained on", tick, about_samples),
        ("seconds", "Against time", "training time, evaluations left out", tick_seconds, about_time),
    ):
        draw = partial(
            charts_lines.lines,
            [line for drawn in logged for line in _loss_lines(drawn, axis, bands)],
            title=f"Loss over {unit}",
            axes=(unit, "loss"),
            log=log,
            as_text=(write, tick),
        )
        figures.append(figure(f"loss-{axis}", caption, logged, draw, full=False, name=name, live=axis))
    return figures


def _coincide(shown: Sequence[Drawn]) -> bool:
    """Return whether several exact variants have the same training curve."""
    curves = [drawn.train for drawn in shown if drawn.train and drawn.variant.exact]
    same = [
        curve for curve in curves[1:] if (curve.steps, curve.samples) == (curves[0].steps, curves[0].samples)
    ]
    near = (
        abs(a - b) <= SAME_LOSS * abs(b)
        for curve in same
        for a, b in zip(curve.mean, curves[0].mean, strict=True)
    )
    return bool(same) and len(same) == len(curves) - 1 and all(near)


def _loss_lines(drawn: Drawn, axis: str, bands: bool) -> list[Line]:
    lines = []
    if drawn.train is not None:
        band = (drawn.train.low, drawn.train.high) if bands else ()
        lines.append(Line(drawn.name, drawn.colour, getattr(drawn.train, axis), drawn.train.mean, *band))
    if drawn.eval is not None:
        x, y = getattr(drawn.eval, axis), drawn.eval.mean
        lines.append(Line(drawn.name, drawn.colour, x, y, dashed=True, marked=True))
    return lines


def device_colours(comparison: Comparison, shown: Sequence[Drawn]) -> dict[str, str]:
    """Return the class of each device's colour, by name."""
    names: dict[str, None] = {}
    for drawn in shown:
        for run in drawn.variant.runs:
            names |= dict.fromkeys(device_names(run).values())
    names |= dict.fromkeys(profile_names(comparison))
    return {name: f"d{place % NUM_DEVICE_COLOURS + 1}" for place, name in enumerate(names)}


def split_bars(shown: Sequence[Drawn], colours: dict[str, str]) -> Figure | None:
    """Return the share of each device at the end of each variant's first seed."""
    stacks = []
    for drawn in shown:
        if not drawn.variant.runs or drawn.variant.num_devices < 2:
            continue
        run = drawn.variant.runs[0]
        names = device_names(run)
        shares = {names[device["id"]]: device["share"] for device in run.summary["devices"]}
        if drawn.shares is not None:
            shares |= {name: steps[-1] for name, steps in drawn.shares.by_device.items()}
        # In the legend's order: a planner may have changed the devices' order.
        ordered = [(name, colour, shares.get(name)) for name, colour in colours.items()]
        parts = [Part(name, share, colour) for name, colour, share in ordered if share is not None]
        stacks.append((row(drawn), parts))
    if not stacks:
        return None
    used = {part.name for _, parts in stacks for part in parts}
    legend = [(colour, name) for name, colour in colours.items() if name in used]
    caption = "Part of each global batch (of the layers' work, if the model is cut) at the end of the run."
    title = "Split of the work over the devices"
    draw = partial(charts_bars.stacked, stacks, title=title, axis="of the work")
    return figure("split", caption, shown, draw, legend=legend)


def split_over_time(shown: Sequence[Drawn], colours: dict[str, str]) -> list[Figure]:
    """Return a figure of the shares over the steps, for each variant that changed them."""
    figures = []
    for drawn in shown:
        shares = drawn.shares
        if shares is None or not shares.changes or len(shares.steps) < 2:
            continue
        layers = [(name, colours[name], steps) for name, steps in shares.by_device.items()]
        draw = partial(charts_lines.areas, shares.steps, layers, title=f"Shares over steps: {drawn.name}")
        legend = [(colour, name) for name, colour, _ in layers]
        name, id_ = f"{drawn.number} {drawn.name}", f"split-{drawn.number}"
        figures.append(figure(id_, "", [drawn], draw, full=False, name=name, legend=legend))
    return figures


def predicted(shown: Sequence[Drawn]) -> Figure | None:
    """Return the predicted step time of each variant against the measured one."""
    spots = []
    for drawn in shown:
        measured, model = drawn.variant.step_seconds, drawn.variant.predicted_step_seconds
        if measured is None or not model or measured.mean <= 0:
            continue
        off = deviation(measured.mean, model)
        both = f"predicted {seconds(model)}, measured {seconds(measured.mean)}"
        tip = f"{drawn.name}: {both} ({off})"
        name = f"{drawn.number}: {off}" if drawn.variant.valid else f"{drawn.number} (invalid): {off}"
        spots.append(Spot(model, measured.mean, drawn.colour, tip, name, hollow=drawn.variant.emulated))
    if len(spots) < 2:
        return None
    caption = (
        "On the dashed line both are equal; above it a step took longer than predicted."
        " Labels: the variant's number, and its deviation."
    )
    axes = ("predicted seconds a step", "measured seconds a step")
    title = "Predicted and measured step time"
    draw = partial(charts_lines.scatter, spots, title=title, axes=axes)
    return figure("predicted", caption, shown, draw, full=False, name=title)

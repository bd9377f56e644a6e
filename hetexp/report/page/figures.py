"""The figures of the report's page: which there are, what is in each, and what it says in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetexp.core.summary import LOST_TO
from hetexp.report.charts import bars as charts_bars
from hetexp.report.charts import lines as charts_lines
from hetexp.report.charts.bars import Bar, Part, Row
from hetexp.report.charts.lines import Line, Spot
from hetexp.report.charts.svg import bounds, deviation, number, seconds, tick, tick_seconds
from hetexp.report.page.data import Drawn, device_names, profile_names
from hetexp.report.results import Comparison, Interval

FULL, HALF, PHONE = 1000.0, 470.0, 322.0
"""Widths in CSS pixels that figures are drawn for."""
LOSS_RANGE = 50.0
"""Largest ÷ smallest loss from which its axis is logarithmic."""
MOST_BANDS = 4
"""Variants with bands over their seeds: more cover each other."""
SAME_LOSS = 0.02
"""Curves that differ by less, of their own height, lie upon each other."""
PARTS = {"efficiency": "useful", **{name: name for name in LOST_TO}}
"""Pieces of the devices' own speed, and the class of each one's colour."""
NUM_DEVICE_COLOURS = 8


@dataclass(frozen=True)
class Figure:
    """A chart with what surrounds it."""

    id: str
    caption: str
    draw: Callable[[float], str]
    """SVG for a width."""
    emulated: bool
    full: bool = True
    """Whether it takes the whole width; others stand two in a row."""
    name: str = ""
    """Heading, where several figures share a section."""
    legend: tuple[tuple[str, str], ...] = ()
    """Classes of colours, and what they mean."""
    live: str | None = None
    """Axis of the interactive chart that takes its place on a screen: `samples` or `seconds`."""

    @property
    def wide(self) -> str:
        """SVG for a screen and for paper."""
        return self.draw(FULL if self.full else HALF)

    @property
    def narrow(self) -> str:
        """SVG for a phone."""
        return self.draw(PHONE)


def figure(
    id_: str,
    caption: str,
    shown: Sequence[Drawn],
    draw: Callable[[float], str],
    full: bool = True,
    name: str = "",
    legend: Sequence[tuple[str, str]] = (),
    live: str | None = None,
) -> Figure:
    """Return a figure of these variants; where only some are emulated, its caption says how they look."""
    emulated = [one.variant.emulated for one in shown]
    if any(emulated) and not all(emulated):
        caption = f"{caption} Hatched and hollow: emulated variants.".strip()
    return Figure(id_, caption, draw, any(emulated), full, name, tuple(legend), live)


def row(one: Drawn) -> Row:
    """Return what a row of a chart says of a variant."""
    variant = one.variant
    return Row(one.name, one.number, one.colour, variant.emulated, not variant.valid)


def with_interval(found: Interval, digits: int = 4) -> str:
    """Return a mean with its interval: 131,400 ± 1,200."""
    return f"{number(found.mean, digits)} {bounds(found, lambda value: number(value, 2))}".rstrip()


def bar(one: Drawn, found: Interval, text: str) -> Bar:
    """Return a variant's bar."""
    return Bar(row(one), found.mean, found.low, found.high, text)


def throughput(comparison: Comparison, shown: Sequence[Drawn]) -> Figure | None:
    """Return samples a second of each variant, and of the fastest device alone as a line."""
    found = [
        bar(one, one.variant.samples_per_second, with_interval(one.variant.samples_per_second))
        for one in shown
        if one.variant.samples_per_second is not None
    ]
    if not found:
        return None
    single = comparison.single_samples_per_second
    line = None if single is None else (single, "Fastest device alone")
    title = "Samples a second of each variant"
    caption = "Longer is faster."
    if any(bar.low is not None for bar in found):
        caption += " Whiskers: 95 % confidence interval over seeds."
    if any(bar.row.invalid for bar in found):
        caption += " Pale: invalid, this machine was too slow to emulate it."
    if line:
        caption += f" Dashed line: {comparison.single_source}."
    return figure(
        "throughput", caption, shown, lambda w: charts_bars.bars(found, w, title, "samples / s", line)
    )


def lost(shown: Sequence[Drawn]) -> Figure | None:
    """Return where the sum of the devices' own speeds went, a stack a variant."""
    found = []
    for one in shown:
        if one.variant.efficiency is None or one.variant.lost_to is None:
            continue
        parts = {"efficiency": one.variant.efficiency.mean, **one.variant.lost_to}
        found.append(
            (row(one), [Part(name, value, PARTS[name], name == "other") for name, value in parts.items()])
        )
    if not found:
        return None
    below = any(part.value < -0.005 for _, parts in found for part in parts)
    caption = "100 % is the sum of what each device does alone; the pieces of a row add up to it."
    if below:
        caption += (
            " A piece left of 0 is negative: the run was quicker there than its measured parts allow for, and"
            " the pieces right of 0 exceed 100 % by as much."
        )
    legend = [(PARTS[name], name) for name in PARTS]
    title = "Where the devices' speed went"
    axis = "of the devices' own speeds together"
    return figure("lost", caption, shown, lambda w: charts_bars.stacked(found, w, title, axis), legend=legend)


def gains(shown: Sequence[Drawn]) -> Figure | None:
    """Return the gain over the equal split and over the fastest device alone."""
    panels: list[tuple[str, list[Bar]]] = []
    for name, value in (
        ("over the equal split", "gain_over_equal"),
        ("over the fastest device", "gain_over_single"),
    ):
        dots = [
            Bar(row(one), found.mean, found.low, found.high)
            for one in shown
            if (found := getattr(one.variant, value)) is not None
        ]
        if any(abs(dot.value - 1.0) > 1e-9 for dot in dots):
            panels.append((name, dots))
    if not panels or len(shown) < 2:
        return None
    caption = "Throughput divided by that of the same settings and seed with an equal split"
    if len(panels) == 2:
        caption += ", and by that of the fastest device alone"
    elif panels[0][0] == "over the fastest device":
        caption = "Throughput divided by that of the fastest device alone"
    caption += ". Right of 1 is faster."
    title = "Gain of each variant"
    return figure("gain", caption, shown, lambda w: charts_bars.dots(panels, w, title))


def loss(shown: Sequence[Drawn]) -> list[Figure]:
    """Return the losses against samples, and against time."""
    found = [one for one in shown if one.train or one.eval]
    if not any(one.train and len(one.train.steps) > 1 or one.eval for one in found):
        return []
    values = [v for one in found for curve in (one.train, one.eval) if curve for v in curve.mean]
    log = min(values) > 0 and max(values) / min(values) > LOSS_RANGE
    bands = len(found) <= MOST_BANDS and any(one.train and one.train.low for one in found)
    about = "Lines: training loss; dots: evaluation."
    if any(len(one.variant.runs) > 1 for one in found):
        about += " Means over seeds" + (", bands from the lowest to the highest." if bands else ".")
    if _coincide(found):
        about += " Exact strategies take the same steps: their curves lie upon each other."
    figures = []
    for axis, name, unit in (
        ("samples", "Against samples", "samples trained on"),
        ("seconds", "Against time", "training time, evaluations left out"),
    ):
        lines = [line for one in found for line in _loss_lines(one, axis, bands)]
        write = tick_seconds if axis == "seconds" else tick

        def draw(
            width: float,
            lines: Sequence[Line] = lines,
            unit: str = unit,
            write: Callable[[float], str] = write,
        ) -> str:
            title = f"Loss over {unit}"
            return charts_lines.lines(lines, width, title, (unit, "loss"), log=log, as_text=(write, tick))

        caption = (
            about if axis == "samples" else "The same losses: what is left of a gain in samples a second."
        )
        figures.append(figure(f"loss-{axis}", caption, found, draw, full=False, name=name, live=axis))
    return figures


def _coincide(found: Sequence[Drawn]) -> bool:
    """Return whether several exact variants have one training curve."""
    curves = [one.train for one in found if one.train and one.variant.exact]
    same = [one for one in curves[1:] if one.steps == curves[0].steps and one.samples == curves[0].samples]
    near = (
        abs(a - b) <= SAME_LOSS * abs(b)
        for one in same
        for a, b in zip(one.mean, curves[0].mean, strict=True)
    )
    return bool(same) and len(same) == len(curves) - 1 and all(near)


def _loss_lines(one: Drawn, axis: str, bands: bool) -> list[Line]:
    found = []
    for curve, marked in ((one.train, False), (one.eval, True)):
        if curve is not None:
            found.append(
                Line(
                    one.name,
                    one.colour,
                    getattr(curve, axis),
                    curve.mean,
                    curve.low if bands and not marked else (),
                    curve.high if bands and not marked else (),
                    dashed=marked,
                    marked=marked,
                )
            )
    return found


def device_colours(comparison: Comparison, shown: Sequence[Drawn]) -> dict[str, str]:
    """Return the class of each device's colour, by name."""
    names: dict[str, None] = {}
    for one in shown:
        for run in one.variant.runs:
            names |= dict.fromkeys(device_names(run).values())
    names |= dict.fromkeys(profile_names(comparison))
    return {name: f"d{place % NUM_DEVICE_COLOURS + 1}" for place, name in enumerate(names)}


def split_bars(shown: Sequence[Drawn], colours: dict[str, str]) -> Figure | None:
    """Return the share of each device at the end of each variant's first seed."""
    found = []
    for one in shown:
        if not one.variant.runs or one.variant.num_devices < 2:
            continue
        run = one.variant.runs[0]
        names = device_names(run)
        shares = {names[device["id"]]: device["share"] for device in run.summary["devices"]}
        if one.shares is not None:
            shares |= {name: own[-1] for name, own in one.shares.by_device.items()}
        # In the legend's order: a planner may put the devices into another one.
        known = [(name, colour, shares.get(name)) for name, colour in colours.items()]
        parts = [Part(name, share, colour) for name, colour, share in known if share is not None]
        found.append((row(one), parts))
    if not found:
        return None
    used = {part.name for _, parts in found for part in parts}
    legend = [(colour, name) for name, colour in colours.items() if name in used]
    caption = "Part of each global batch (of the layers' work, where the model is cut) at the end of the run."
    title = "Split of the work over the devices"
    return figure(
        "split", caption, shown, lambda w: charts_bars.stacked(found, w, title, "of the work"), legend=legend
    )


def split_over_time(shown: Sequence[Drawn], colours: dict[str, str]) -> list[Figure]:
    """Return the shares over the steps of each variant that changed them."""
    figures = []
    for one in shown:
        shares = one.shares
        if shares is None or not shares.changes or len(shares.steps) < 2:
            continue
        layers = [(name, colours[name], own) for name, own in shares.by_device.items()]

        def draw(
            width: float,
            steps: Sequence[int] = shares.steps,
            layers: Sequence[tuple[str, str, Sequence[float]]] = layers,
            label: str = one.name,
        ) -> str:
            return charts_lines.areas(steps, layers, width, f"Shares over steps: {label}")

        legend = [(colour, name) for name, colour, _ in layers]
        name, id_ = f"{one.number} {one.name}", f"split-{one.number}"
        figures.append(figure(id_, "", [one], draw, full=False, name=name, legend=legend))
    return figures


def predicted(shown: Sequence[Drawn]) -> Figure | None:
    """Return the predicted step time of each variant against the measured one."""
    found = []
    for one in shown:
        measured, model = one.variant.step_seconds, one.variant.predicted_step_seconds
        if measured is None or not model or measured.mean <= 0:
            continue
        off = deviation(measured.mean, model)
        both = f"predicted {seconds(model)}, measured {seconds(measured.mean)}"
        tip = f"{one.name}: {both} ({off})"
        name = f"{one.number}: {off}" if one.variant.valid else f"{one.number} (invalid): {off}"
        found.append(Spot(model, measured.mean, one.colour, tip, name, hollow=one.variant.emulated))
    if len(found) < 2:
        return None
    caption = (
        "On the dashed line both are equal; above it a step took longer than predicted."
        " Labels: the variant's number, and by how much."
    )
    axes = ("predicted seconds a step", "measured seconds a step")
    title = "Predicted and measured step time"
    return figure(
        "predicted",
        caption,
        shown,
        lambda w: charts_lines.scatter(found, w, title, axes),
        full=False,
        name=title,
    )

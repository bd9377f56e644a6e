"""Charts with a row a variant: bars, stacked bars, and dots around 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetexp.report.charts.svg import (
    NARROW,
    SMALL,
    Scale,
    Svg,
    fitted,
    percent,
    scale,
    text_width,
    value_axis,
    whole_percent,
    wrapped,
)
from hetexp.report.words import number

BAR = 18.0
"""Height of a bar in pixels."""
_KEY = 40.0
"""Width of a row's colour and number."""
MOST_WHISKER = 1.3
"""Longest whisker ÷ longest bar; a longer whisker is cut and ends in an arrow, so that bars stay readable."""


@dataclass(frozen=True)
class Row:
    """The label and look of a row."""

    label: str
    number: int
    """The variant's number in the page's table."""
    colour: str
    """Class of its colour."""
    emulated: bool = False
    invalid: bool = False


@dataclass(frozen=True)
class Bar:
    """A value with its interval, drawn as a bar or as a dot."""

    row: Row
    value: float
    low: float | None
    high: float | None
    text: str = ""
    """Written beside a bar."""


@dataclass(frozen=True)
class Part:
    """A segment of a stacked bar."""

    name: str
    value: float
    """Fraction of 1; a negative segment lies left of the zero line."""
    colour: str
    hatched: bool = False


class Rows:
    """The positions of rows and their labels: beside the marks, or above them in a narrow drawing."""

    def __init__(self, rows: Sequence[Row], width: float, top: float) -> None:
        self.rows, self.top = rows, top
        self.above = width < NARROW
        widest = max(text_width(row.label) for row in rows)
        self.room = width - _KEY - 4 if self.above else min(widest + 6, 0.31 * width)
        self.left = 2.0 if self.above else _KEY + self.room + 12
        self.pitch = 50.0 if self.above else 38.0
        self.bottom = top + self.pitch * len(rows)

    def mark(self, place: int) -> float:
        """Return the upper edge of a row's mark."""
        return self.top + place * self.pitch + (24.0 if self.above else (self.pitch - BAR) / 2)

    def draw(self, svg: Svg) -> None:
        """Write each row's colour, number and label."""
        for place, row in enumerate(self.rows):
            middle = self.mark(place) + (-11.0 if self.above else BAR / 2)
            svg.rect(2.0, middle - 5, 10.0, 10.0, f"swatch {row.colour}", rx=2)
            svg.text(17.0, middle + 4.5, str(row.number), "number")
            lines = wrapped(row.label, self.room, lines=1 if self.above else 2)
            first = middle + 4.5 - 7.5 * (len(lines) - 1)
            for at, text in enumerate(lines):
                svg.text(_KEY + 2, first + 15 * at, text, "label", data_full=row.label)


def bars(
    rows: Sequence[Bar],
    width: float,
    title: str,
    axis: str,
    reference: tuple[float, str] | None = None,
) -> str:
    """Return bars from 0 with whiskers, and a reference line.

    Args:
        axis: name and unit of the values.
        reference: value and name of the line.
    """
    places = Rows([bar.row for bar in rows], width, 30.0 if reference else 8.0)
    svg = Svg(width, places.bottom + 44, title)
    beside = max(text_width(bar.text, SMALL) for bar in rows) + 10
    most = MOST_WHISKER * max(bar.value for bar in rows)
    top_values = [max(bar.value, min(bar.high or bar.value, most)) for bar in rows]
    if reference:
        top_values.append(reference[0])
    count = 4 if places.above else 6
    # the longest bar needs space for its text, a reference beyond all bars does not
    across = scale([0.0, *top_values], places.left, width - 12, zero=True, tight=True, count=count)
    if max(across(value) for value in top_values[: len(rows)]) + beside > width:
        across = scale([0.0, *top_values], places.left, width - beside, zero=True, tight=True, count=count)
    value_axis(svg, across, places.top, places.bottom, axis)
    if reference:
        _reference(svg, across, places, reference, width)
    places.draw(svg)
    for place, bar in enumerate(rows):
        _bar(svg, across, places.mark(place), bar)
    return str(svg)


def _bar(svg: Svg, across: Scale, y: float, bar: Bar) -> None:
    length = across(bar.value) - across.start
    pale = " pale" if bar.row.invalid else ""
    svg.rect(
        across.start, y, length, BAR, f"bar {bar.row.colour}{pale}", tip=f"{bar.row.label}: {bar.text}", rx=2
    )
    if bar.row.emulated:
        svg.rect(across.start, y, length, BAR, "hatch", rx=2)
    end = whisker(svg, across, y + BAR / 2, bar)
    svg.text(end + 7, y + BAR / 2 + 4, bar.text, "value")


def whisker(svg: Svg, across: Scale, y: float, bar: Bar) -> float:
    """Draw a horizontal confidence interval, if there is one; an end beyond the axis becomes an arrow.

    Returns:
        Right end of bar and interval, in pixels.
    """
    low, high = bar.low, bar.high
    if low is None or high is None:
        return across(bar.value)
    start, end = max(across(low), across.start), min(across(high), across.end)
    svg.line(start, y, end, y, "whisker")
    for x, cut, inwards in (
        (start, across(low) < across.start - 0.5, 5),
        (end, across(high) > across.end + 0.5, -5),
    ):
        if cut:
            svg.path([(x + inwards, y - 4.0), (x, y), (x + inwards, y + 4.0)], "whisker open")
        else:
            svg.line(x, y - 4, x, y + 4, "whisker")
    return max(across(bar.value), end)


def _reference(svg: Svg, across: Scale, places: Rows, reference: tuple[float, str], width: float) -> None:
    value, name = reference
    x = across(value)
    svg.line(x, 20.0, x, places.bottom, "reference")
    text = fitted(f"{name}: {number(value, 4)}", width - 8, SMALL)
    half = text_width(text, SMALL) / 2
    svg.text(min(max(x, half + 4), width - half - 4), 13.0, text, "reference-name", "middle")


def stacked(rows: Sequence[tuple[Row, Sequence[Part]]], width: float, title: str, axis: str) -> str:
    """Return stacked bars of fractions of 1; negative segments lie left of the zero line, hatched."""
    places = Rows([row for row, _ in rows], width, 8.0)
    svg = Svg(width, places.bottom + 44, title)
    ends = [sum(max(part.value, 0.0) for part in parts) for _, parts in rows]
    starts = [sum(min(part.value, 0.0) for part in parts) for _, parts in rows]
    low, high = min(starts), max(1.0, *ends)
    margin = 0.005  # rounding errors must not lengthen the axis
    low, high = (0.0 if low > -margin else low), (1.0 if high < 1 + margin else high)
    room = 22.0 if low < 0 and places.above else 0.0
    across = scale(
        [low, high], places.left + room, width - 22, zero=True, tight=True, count=5 if places.above else 8
    )
    value_axis(svg, across, places.top, places.bottom, axis, whole_percent)
    if across.low < 0 or across.high > 1:
        svg.line(across(1.0), places.top, across(1.0), places.bottom, "reference")
    places.draw(svg)
    for place, (row, parts) in enumerate(rows):
        _stack(svg, across, places.mark(place), row, parts)
    return str(svg)


def _stack(svg: Svg, across: Scale, y: float, row: Row, parts: Sequence[Part]) -> None:
    right = left = 0.0
    for part in parts:
        start = right if part.value >= 0 else left + part.value
        right, left = right + max(part.value, 0.0), left + min(part.value, 0.0)
        x, length = across(start), across(start + abs(part.value)) - across(start)
        if length < 0.4:
            continue
        tip = f"{row.label}: {part.name} {percent(part.value)}"
        svg.rect(x, y, length, BAR, f"part {part.colour}", tip=tip)
        if part.hatched or part.value < 0:
            svg.rect(x, y, length, BAR, "hatch")
        text = whole_percent(part.value).removesuffix(" %")
        if length > text_width(text, SMALL) + 8:
            svg.text(x + length / 2, y + BAR / 2 + 4, text, f"inside on-{part.colour}", "middle")


def dots(panels: Sequence[tuple[str, Sequence[Bar]]], width: float, title: str) -> str:
    """Return ratios around 1 with their intervals, in panels that share axis and rows.

    Panels stand side by side, or one below the other in a narrow drawing.
    """
    rows = list({dot.row.number: dot.row for _, dots_ in panels for dot in dots_}.values())
    rows.sort(key=lambda row: row.number)
    values = [dot.value for _, dots_ in panels for dot in dots_]
    ends = [v for _, dots_ in panels for dot in dots_ for v in (dot.low, dot.high) if v is not None]
    most = MOST_WHISKER * max(1.0, *values)
    low = max(min(0.95, *values, *ends), min(0.95, *values) - 0.3 * max(values), 0.0)
    high = max(1.05, *values, *(min(end, most) for end in ends))
    if width < NARROW:
        return _dots_below(panels, width, title, low, high)
    places = Rows(rows, width, 34.0)
    svg = Svg(width, places.bottom + 44, title)
    each = (width - places.left - 14) / len(panels)
    for at, (name, panel_dots) in enumerate(panels):
        start = places.left + at * each + (24 if at else 0)
        across = scale([low, high], start, places.left + (at + 1) * each - 64, count=4)
        svg.text(start, 16.0, name, "panel")
        _panel(svg, across, panel_dots, places)
    places.draw(svg)
    return str(svg)


def _dots_below(
    panels: Sequence[tuple[str, Sequence[Bar]]], width: float, title: str, low: float, high: float
) -> str:
    svg, top = Svg(width, 0.0, title), 34.0
    for name, panel_dots in panels:
        places = Rows([dot.row for dot in panel_dots], width, top)
        top = places.bottom + 90
        svg.text(2.0, places.top - 18, name, "panel")
        across = scale([low, high], 12.0, width - 64, count=4)
        _panel(svg, across, panel_dots, places)
        places.draw(svg)
    svg.height = top - 46
    return str(svg)


def _panel(svg: Svg, across: Scale, panel_dots: Sequence[Bar], places: Rows) -> None:
    marks = {row.number: places.mark(i) for i, row in enumerate(places.rows)}
    value_axis(svg, across, places.top, places.bottom, "", lambda value: f"{value:.4g}×")
    svg.line(across(1.0), places.top, across(1.0), places.bottom, "reference")
    for dot in panel_dots:
        y = marks[dot.row.number] + BAR / 2
        end = whisker(svg, across, y, dot)
        tip = f"{dot.row.label}: {dot.value:.3f}×"
        kind = "dot hollow" if dot.row.emulated else "dot"
        svg.add("circle", tip=tip, cx=across(dot.value), cy=y, r=6.0, class_=f"{kind} {dot.row.colour}")
        svg.text(end + 11, y + 4, f"{dot.value:.2f}×", "value")

"""Line and point charts: losses, shares over steps, predicted and measured times, weights curve, profiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetexp.report.charts.svg import (
    NARROW,
    SMALL,
    Scale,
    Svg,
    fitted,
    height_axis,
    scale,
    text_width,
    tick,
    tick_seconds,
    value_axis,
    whole_percent,
)
from hetexp.report.words import number, seconds

WIDE_RANGE = 8.0
"""Largest ÷ smallest value from which an axis is logarithmic."""


@dataclass(frozen=True)
class Line:
    """A curve, with a band around it if there are several seeds."""

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False
    marked: bool = False
    """Whether each point has a mark."""


@dataclass(frozen=True)
class Spot:
    """A point with a tooltip."""

    x: float
    y: float
    colour: str
    tip: str
    name: str = ""
    low: float | None = None
    high: float | None = None
    hollow: bool = False


def lines(
    curves: Sequence[Line],
    width: float,
    title: str,
    axes: tuple[str, str],
    *,
    log: bool = False,
    as_text: tuple[Callable[[float], str], Callable[[float], str]] = (tick, tick),
) -> str:
    """Return curves with their bands.

    Args:
        axes: names and units of both axes.
        log: whether the vertical axis is logarithmic.
        as_text: functions that write the numbers of the axes.
    """
    height = 300.0
    svg = Svg(width, height, title)
    heights = [v for curve in curves for v in (*curve.y, *curve.low, *curve.high) if not log or v > 0]
    up = scale(heights, height - 46, 34.0, log=log)
    across, left = _across([v for curve in curves for v in curve.x], up, width, as_text[1])
    height_axis(svg, up, left, width - 16, axes[1], as_text[1])
    value_axis(svg, across, 34.0, height - 46, axes[0], as_text[0])
    for curve in curves:
        band = [*zip(curve.x, curve.high, strict=False), *reversed([*zip(curve.x, curve.low, strict=False)])]
        svg.path([(across(x), up(y)) for x, y in band], f"band {curve.colour}")
    for curve in curves:
        dashed = " dashed" if curve.dashed else ""
        points = [(across(x), up(y)) for x, y in zip(curve.x, curve.y, strict=True) if not log or y > 0]
        svg.path(points, f"curve {curve.colour}{dashed}")
        if curve.marked or len(points) == 1:
            for (x, y), value in zip(points, curve.y, strict=False):
                tip = f"{curve.label}: {number(value)}"
                svg.add("circle", tip=tip, cx=x, cy=y, r=3.5, class_=f"dot {curve.colour}")
    return str(svg)


def _across(
    values: Sequence[float], up: Scale, width: float, write: Callable[[float], str]
) -> tuple[Scale, float]:
    """Return the horizontal scale beside the numbers of a vertical axis, and its left end."""
    left = max(text_width(write(value), SMALL) for value in up.ticks) + 12
    exact = scale(values, left, width - 16, count=4 if width < NARROW else 7)
    if not exact.ticks or min(values) < 0:
        return exact, left
    low = 0.0 if min(values) < 0.25 * max(values) else exact.low
    high = max(max(values), low + 1e-12)  # the axis ends with the data, not at the next tick
    shown = tuple(t for t in exact.ticks if low <= t <= high)
    return Scale(low, high, left, width - 16, ticks=shown), left


def areas(
    steps: Sequence[float], shares: Sequence[tuple[str, str, Sequence[float]]], width: float, title: str
) -> str:
    """Return the devices' shares over the steps, stacked to 1.

    Args:
        shares: each device's name, colour and share at each step; the first lies at the bottom.
    """
    height = 150.0
    svg = Svg(width, height, title)
    up = Scale(0.0, 1.0, height - 42, 10.0, ticks=(0.0, 0.5, 1.0))
    left = 46.0
    low, high = min(steps), max(steps)
    wide = scale([low, high], left, width - 14, count=4)
    across = Scale(
        low, max(high, low + 1), left, width - 14, ticks=tuple(t for t in wide.ticks if low <= t <= high)
    )
    below = [0.0] * len(steps)
    for name, colour, share in shares:
        above = [b + value for b, value in zip(below, share, strict=True)]
        outline = [*zip(steps, above, strict=True), *reversed([*zip(steps, below, strict=True)])]
        tip = f"{name}: {share[0]:.1%} at first, {share[-1]:.1%} at the end"
        d = "M" + "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in outline) + "Z"
        svg.add("path", tip=tip, d=d, class_=f"area {colour}")
        below = above
    height_axis(svg, up, left, width - 14, "", whole_percent)
    value_axis(svg, across, 10.0, height - 42, "step")
    return str(svg)


def scatter(spots: Sequence[Spot], width: float, title: str, axes: tuple[str, str]) -> str:
    """Return points around the diagonal, on which both values are equal; both axes have one scale."""
    height = 330.0
    values = [v for spot in spots for v in (spot.x, spot.y)]
    log = max(values) / min(values) > WIDE_RANGE
    svg = Svg(width, height, title)
    pad = 0.0 if log else 0.06 * (max(values) - min(values))
    within = [min(values) - pad, max(values) + pad]
    up = scale(within, height - 46, 34.0, log=log)
    left = max(text_width(tick_seconds(value), SMALL) for value in up.ticks) + 12
    across = scale(within, left, width - 24, log=log)
    height_axis(svg, up, left, width - 24, axes[1], tick_seconds)
    value_axis(svg, across, 34.0, height - 46, axes[0], tick_seconds)
    svg.line(across(across.low), up(up.low), across(across.high), up(up.high), "reference")
    for spot in spots:
        _spot(svg, across, up, spot)
    names(svg, [(across(s.x), up(s.y), s.name) for s in spots], width - 2)
    return str(svg)


def _spot(svg: Svg, across: Scale, up: Scale, spot: Spot) -> None:
    x = across(spot.x)
    if spot.low is not None and spot.high is not None:
        low, high = up(max(spot.low, up.low)), up(spot.high)
        svg.line(x, low, x, high, "whisker")
        for y in (low, high):
            svg.line(x - 4, y, x + 4, y, "whisker")
    kind = "dot hollow" if spot.hollow else "dot"
    svg.add("circle", tip=spot.tip, cx=x, cy=up(spot.y), r=5.5, class_=f"{kind} {spot.colour}")


BESIDE = ((10, 4, "start"), (-10, 4, "end"), (0, -11, "middle"), (0, 21, "middle"))
ABOVE = ((0, -15, "middle"), (0, 25, "middle"), (11, 4, "start"), (-11, 4, "end"))
"""Positions of a name at its point, the best first: pixels to the right, pixels down, and anchor."""


def names(
    svg: Svg,
    named: Sequence[tuple[float, float, str]],
    right: float,
    places: Sequence[tuple[int, int, str]] = BESIDE,
) -> None:
    """Write names beside their points if they cover no other name or point; the others remain tooltips."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y, _ in named]
    for x, y, name in named:
        wide = text_width(name, SMALL)
        for dx, dy, anchor in places:
            start = x + dx - {"start": 0.0, "end": wide, "middle": wide / 2}[anchor]
            box = (start, y + dy - 10, start + wide, y + dy + 3)
            if start < 44 or box[2] > right or any(_overlap(box, other) for other in taken):
                continue
            svg.text(x + dx, y + dy, name, "name", anchor)
            taken.append(box)
            break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def weights_curve(
    spots: Sequence[Spot],
    predicted: Sequence[tuple[float, float]],
    marked: Sequence[tuple[float, str, str]],
    width: float,
    title: str,
    axes: tuple[str, str],
) -> str:
    """Return throughput over a device's share: measured points, the predicted curve, both optima.

    Args:
        predicted: shares and throughputs of the cost model; may be empty.
        marked: shares to mark by a vertical line, with the line's class and name.
    """
    height = 340.0
    svg = Svg(width, height, title)
    top = 36.0 + 17 * len(marked)
    heights = [v for s in spots for v in (s.y, s.low, s.high) if v is not None] + [y for _, y in predicted]
    up = scale([0.0, *heights], height - 46, top, zero=True)
    left = max(text_width(tick(value), SMALL) for value in up.ticks) + 12
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    across = Scale(0.0, 1.0, left, width - 24, ticks=ticks)
    height_axis(svg, up, left, width - 24, axes[1])
    value_axis(svg, across, top, height - 46, axes[0], whole_percent)
    for place, (share, class_, name) in enumerate(marked):
        x, y = across(share), 12.0 + 17 * place
        svg.line(x, y + 6, x, height - 46, class_)
        text = fitted(name, width - left, SMALL)
        half = text_width(text, SMALL) / 2
        svg.text(min(max(x, left + half), width - half - 2), y + 1, text, "reference-name", "middle")
    svg.path([(across(x), up(y)) for x, y in predicted], "curve model dashed")
    ordered = sorted(spots, key=lambda spot: spot.x)
    svg.path([(across(s.x), up(s.y)) for s in ordered], "curve through")
    for spot in ordered:
        _spot(svg, across, up, spot)
    names(svg, [(across(s.x), up(s.y), s.name) for s in ordered], width - 2, ABOVE)
    return str(svg)


def profiles(devices: Sequence[tuple[Line, float, float]], width: float, title: str) -> str:
    """Return the devices' measured seconds over samples, each with its fitted line.

    Args:
        devices: measured points, and the fitted line's seconds at 0 samples and for each sample.
    """
    height = 320.0
    svg = Svg(width, height, title)
    most = max(x for line, _, _ in devices for x in line.x)
    tops = [
        *(y for line, _, _ in devices for y in line.y),
        *(fixed + each * most for _, fixed, each in devices),
    ]
    up = scale([0.0, *tops], height - 46, 34.0, zero=True)
    left = max(text_width(tick_seconds(value), SMALL) for value in up.ticks) + 12
    across = scale([0.0, float(most)], left, width - 24, zero=True, count=4 if width < NARROW else 8)
    height_axis(svg, up, left, width - 24, "seconds of forward and backward", tick_seconds)
    value_axis(svg, across, 34.0, height - 46, "samples in the pass")
    for line, fixed, each in devices:
        ends = [(across(x), up(fixed + each * x)) for x in (0.0, float(most))]
        svg.path(ends, f"curve {line.colour} dashed")
        for x, y in zip(line.x, line.y, strict=True):
            tip = f"{line.label}: {number(x)} samples in {seconds(y)}"
            svg.add("circle", tip=tip, cx=across(x), cy=up(y), r=5.0, class_=f"dot {line.colour}")
    return str(svg)

"""Charts as SVG text: elements, axes and readable numbers.

A chart is drawn for a width in CSS pixels, so that its text keeps its size. The page has each chart wide and
narrow, and shows the one that fits. Colours are classes and CSS variables, for light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from hetexp.report.results import Interval
from hetexp.report.words import number

NARROW = 480.0
"""In narrower drawings labels stand above their marks."""
TEXT, SMALL = 13.0, 12.0
"""Heights of text in pixels, as in the page's style sheet."""
_WIDE, _THIN = frozenset("mwMWQOGD@%—→"), frozenset("iljft.,:;'|!()[]{} I1·")


class Svg:
    """One drawing: elements in the order in which they are painted."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def add(self, name: str, text: str | None = None, tip: str | None = None, **attributes: Any) -> None:
        """Add an element.

        Args:
            text: its content, which is escaped.
            tip: its tooltip.
            attributes: of the element; `class_` is its class, and underscores become hyphens.
        """
        words = " ".join(
            f'{key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
            for key, value in attributes.items()
            if value is not None
        )
        inner = escape(text) if text is not None else ""
        if tip is not None:
            inner = f"<title>{escape(tip)}</title>{inner}"
        self.parts.append(f"<{name} {words}>{inner}</{name}>" if inner else f"<{name} {words}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, class_: str, **more: Any) -> None:
        """Add a straight line."""
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, **more)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        class_: str,
        tip: str | None = None,
        **more: Any,
    ) -> None:
        """Add a rectangle."""
        self.add("rect", tip=tip, x=x, y=y, width=max(width, 0.0), height=height, class_=class_, **more)

    def text(
        self, x: float, y: float, text: str, class_: str = "", anchor: str = "start", **more: Any
    ) -> None:
        """Add a line of text; `y` is its baseline."""
        self.add("text", text=text, x=x, y=y, class_=class_ or None, text_anchor=anchor, **more)

    def path(self, points: Sequence[tuple[float, float]], class_: str, **more: Any) -> None:
        """Add a line through the points, or an area if the class fills it."""
        if points:
            d = "M" + "L".join(f"{_plain(x)} {_plain(y)}" for x, y in points)
            self.add("path", d=d, class_=class_, **more)

    def __str__(self) -> str:
        box = f'viewBox="0 0 {_plain(self.width)} {_plain(self.height)}"'
        head = f'<svg {box} width="{_plain(self.width)}" height="{_plain(self.height)}" role="img">'
        return "".join([head, f"<title>{escape(self.title)}</title>", *self.parts, "</svg>"])


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, linearly or logarithmically."""

    low: float
    high: float
    start: float
    """Pixel of `low`."""
    end: float
    log: bool = False
    ticks: tuple[float, ...] = field(default=())

    def __call__(self, value: float) -> float:
        if self.log:
            part = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def scale(
    values: Sequence[float],
    start: float,
    end: float,
    *,
    zero: bool = False,
    log: bool = False,
    tight: bool = False,
    count: int = 5,
) -> Scale:
    """Return a scale of these values, with ticks at round values.

    Args:
        zero: whether the scale includes 0, as bars need.
        tight: whether the scale ends at the last value, and not at the next tick.
        count: approximate number of ticks.
    """
    low, high = min(values), max(values)
    if log:
        return _log_scale(low, high, start, end)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        low, high = (low - 0.5 * (abs(low) or 1.0)) if not zero else low, high + 0.5 * (abs(high) or 1.0)
    step = round_step((high - low) / max(count, 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(place * step for place in range(first, last + 1))
    if tight:
        inside = tuple(tick for tick in ticks if low - 1e-9 * step <= tick <= high + 1e-9 * step)
        return Scale(low, high, start, end, ticks=inside)
    return Scale(ticks[0], ticks[-1], start, end, ticks=ticks)


def _log_scale(low: float, high: float, start: float, end: float) -> Scale:
    low, high = low * 0.92, high * 1.08
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [m * 10.0**d for d in decades for m in (1, 2, 5)]
    ticks = [tick for tick in every if low <= tick <= high]
    if len(ticks) > 7:
        ticks = [tick for tick in ticks if math.log10(tick) % 1 < 1e-9 or math.log10(tick) % 1 > 1 - 1e-9]
    ticks = ticks[:: math.ceil(len(ticks) / 7)] if ticks else ticks
    if len(ticks) < 2:
        ticks = list(scale((low, high), start, end).ticks[1:-1])
    return Scale(low, high, start, end, True, tuple(ticks))


def round_step(step: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 × powers of ten that is not below the step."""
    size = 10.0 ** math.floor(math.log10(step))
    return next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= step * (1 - 1e-9))


def tick(value: float) -> str:
    """Return a tick's number, short: 50k, 0.25."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def tick_seconds(value: float) -> str:
    """Return a tick's duration, short: 1.5 ms."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if abs(value) >= size * (1 - 1e-9):
            return f"{value / size:.4g} {unit}"
    return "0"


def whole_percent(part: float) -> str:
    """Return a fraction in whole percent."""
    return f"{100 * part:.0f} %".replace("-", "−")


def percent(part: float) -> str:
    """Return a fraction in percent, with one decimal."""
    return f"{100 * part:.1f} %".replace("-", "−")


def bounds(value: Interval, write: Callable[[float], str]) -> str:
    """Return the interval around a mean: ± 1.2 if it is symmetric, else 1.3–1.6."""
    if value.low is None or value.high is None:
        return ""
    below, above = value.mean - value.low, value.high - value.mean
    if abs(above - below) <= 0.02 * max(above, below):
        return f"± {write(above)}"
    return f"{write(value.low)}–{write(value.high)}"


def deviation(measured: float, model: float) -> str:
    """Return the deviation of a measured time from the predicted one: −12.3 %."""
    return f"{100 * (measured / model - 1):+.1f} %".replace("-", "−")


def size(num_bytes: float) -> str:
    """Return a number of bytes in GB, MB, kB or B."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{number(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} B"


def text_width(text: str, height: float = TEXT) -> float:
    """Return a text's approximate width in a sans-serif font, rather too large than too small."""
    ems = sum(0.88 if c in _WIDE else 0.36 if c in _THIN else 0.62 for c in text)
    return ems * height


def fitted(text: str, width: float, height: float = TEXT) -> str:
    """Return the text without its middle if it is too wide: both ends distinguish variants."""
    if text_width(text, height) <= width:
        return text
    keep = len(text)
    while keep > 4 and text_width(text[:keep], height) > width - height:
        keep -= 1
    front = math.ceil(keep * 0.6)
    return f"{text[:front].rstrip()}…{text[len(text) - (keep - front) :].lstrip()}"


def wrapped(text: str, width: float, lines: int = 2) -> list[str]:
    """Return the text in at most `lines` lines, broken after commas and shortened to the width."""
    rows = [""]
    for word in text.replace(", ", ",\n").split("\n"):
        longer = f"{rows[-1]} {word}".strip()
        if text_width(longer) <= width or not rows[-1] or len(rows) == lines:
            rows[-1] = longer
        else:
            rows.append(word)
    return [fitted(line, width) for line in rows]


def _plain(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def value_axis(
    svg: Svg, across: Scale, top: float, bottom: float, name: str, as_text: Callable[[float], str] = tick
) -> None:
    """Draw vertical grid lines with their numbers below, and the axis' name below the numbers."""
    taken = -math.inf
    for value in across.ticks:
        x, text = across(value), as_text(value)
        svg.line(x, top, x, bottom, "zero" if value == 0 else "grid")
        half = text_width(text, SMALL) / 2
        if x - half > taken + 4:  # a number that would touch the previous number is left out
            svg.text(x, bottom + 17, text, "tick", "middle")
            taken = x + half
    svg.text((across.start + across.end) / 2, bottom + 35, name, "axis", "middle")


def height_axis(
    svg: Svg, up: Scale, left: float, right: float, name: str, as_text: Callable[[float], str] = tick
) -> None:
    """Draw horizontal grid lines with their numbers to the left, and the axis' name above them."""
    for value in up.ticks:
        svg.line(left, up(value), right, up(value), "zero" if value == 0 else "grid")
        svg.text(left - 7, up(value) + 4, as_text(value), "tick", "end")
    svg.text(2, min(up.start, up.end) - 12, name, "axis")

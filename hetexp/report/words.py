"""Readable numbers, intervals and durations."""

from __future__ import annotations

import math

from hetexp.report.results import Interval

UNKNOWN = "–"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits and separated thousands: 131,400, 0.0123.

    `–` stands for an unknown number.
    """
    if value is None:
        return UNKNOWN
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not finite"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    value = round(value, places)
    places = digits - 1 - math.floor(math.log10(abs(value)))  # 9.996 became 10.0
    if abs(value) >= 1e15 or abs(value) < 1e-5:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(places, 0)}f}"


def interval_text(value: Interval | None, digits: int) -> str:
    """Return the bounds of an interval; empty without bounds."""
    if value is None or value.low is None or value.high is None:
        return ""
    to = "–" if value.low >= 0 else " to "
    return f"{number(value.low, digits)}{to}{number(value.high, digits)}"


def seconds(value: float | None, digits: int = 3) -> str:
    """Return a duration in s, ms, µs or ns."""
    if value is None or not math.isfinite(value):
        return number(value)
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= size:
            return f"{number(value / size, digits)} {unit}"
    return f"{number(value / 1e-9, digits)} ns" if value else "0 s"


def counted(count: int, word: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"

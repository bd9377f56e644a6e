"""Readable numbers, intervals and durations."""

from __future__ import annotations

import math

from hetexp.report.results import Interval

UNKNOWN = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits and separated thousands; `–` if it is unknown."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if -4 <= size < 9:
        return f"{round(value, digits - 1 - size):,.{max(digits - 1 - size, 0)}f}"
    return f"{value:.{digits - 1}e}"


def interval_text(value: Interval | None, digits: int = 4) -> str:
    """Return the bounds of an interval; empty without bounds."""
    if value is None or value.low is None or value.high is None:
        return ""
    to = "–" if value.low >= 0 else " to "
    return f"{number(value.low, digits)}{to}{number(value.high, digits)}"


def seconds(value: float | None) -> str:
    """Return a duration with its unit."""
    if value is None or not math.isfinite(value):
        return number(value)
    unit, size = next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if abs(value) >= size), ("µs", 1e-6)
    )
    return f"{number(value / size)} {unit}"


def counted(count: int, word: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"

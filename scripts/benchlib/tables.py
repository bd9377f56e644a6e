"""Figures as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- {name}: begin -->", "<!-- {name}: end -->"
"""Around each table in a page, so that it can be replaced."""


def row(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    return "\n".join([row(head), "|" + "---|" * len(head), *map(row, rows)])


def figure(value: float | None, form: str, factor: float = 1.0) -> str:
    """Return a figure, `–` for one that is not known."""
    return "–" if value is None or math.isnan(value) else format(value * factor, form)


def ratio(one: float | None, other: float | None) -> float | None:
    """Return one ÷ other, `None` if either is not known."""
    return one / other if one is not None and other else None


def parts(counts: Sequence[object]) -> str:
    """Return what each device has."""
    return " / ".join("–" if count is None else str(count) for count in counts)


def median_of(runs: Sequence[dict[str, Any]] | None, key: str) -> float | None:
    """Return the median over runs of a figure, of a list its largest; `None` if a run does not have it."""
    values = [run.get(key) for run in runs or ()]
    flat = [
        max(value, default=None) if isinstance(value, list) and None not in value else value
        for value in values
    ]
    known = [value for value in flat if isinstance(value, (int, float))]
    return statistics.median(known) if known and len(known) == len(values) else None


def mark(runs: Sequence[dict[str, Any]]) -> str:
    """Return the mark of runs one of which this machine could not pace."""
    return "" if all(run["valid"] for run in runs) else " (!)"


def footnote(runs: Sequence[dict[str, Any]]) -> str:
    """Explain the mark, if any run has it."""
    lost = sum(not run["valid"] for run in runs)
    if not lost:
        return ""
    return (
        f"\n\n(!) {lost} of {len(runs)} runs were outrun: this machine was more than 2 % late on a pass or a "
        "link, and the figure is a little low."
    )


def write(path: Path, tables: dict[str, str]) -> None:
    """Put tables between their marks in a page.

    Raises:
        ValueError: the page has no place for one.
    """
    text = path.read_text(encoding="utf-8")
    for name, content in tables.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{path} must hold {begin} and {end} once, so that the table has a place")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"
    path.write_text(text, encoding="utf-8")


def publish(tables: dict[str, str], page: Path | None) -> None:
    """Print tables, and put them into a page if there is one."""
    for name, content in tables.items():
        print(f"\n{name}\n\n{content}")
    if page is not None:
        write(page, tables)

"""The table of many kills."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchlib import tables

from chaos_lab.orders import KINDS


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of outcomes, one line a kind of kill, and the seeds that went wrong."""
    cells = []
    for kind in (*KINDS, None):
        mine = [row for row in rows if kind in (None, row["kind"])]
        if not mine:
            continue
        results = Counter(row["result"] for row in mine if not row["problems"])
        survived, went_on = results.pop("survived", 0), results.pop("went on", 0)
        other = ", ".join(f"{count} {name}" for name, count in sorted(results.items()))
        numbers = [str(number) for number in (len(mine), survived, went_on)]
        wrong = str(sum(bool(row["problems"]) for row in mine))
        spreads = [_spread(mine, "pause_seconds"), _spread(mine, "end_seconds")]
        cells.append([kind or "**all**", *numbers, other or "–", wrong, *spreads])
    head = ["what was done", "kills", "survived", "went on by `resume`", "other", "wrong"]
    head += ["pause s: median (longest)", "end s: median (longest)"]
    lines = [tables.table(head, cells)]
    seeds = [row["seed"] for row in rows]
    if seeds:
        wall = sum(row["wall_seconds"] for row in rows)
        lines.append(f"\nSeeds {min(seeds)} to {max(seeds)}, {len(seeds)} kills in {wall / 60:.1f} min.")
    lost = [row["lost_steps"] for row in rows if row["lost_steps"] is not None]
    if lost:
        lines.append(
            f"Runs that went on by `resume` did {statistics.mean(lost):.1f} steps again, {max(lost)} at most."
        )
    return "\n".join(lines)


def _spread(rows: Sequence[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if row[key] is not None and not row["problems"]]
    return f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "–"

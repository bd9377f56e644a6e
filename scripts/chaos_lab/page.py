"""The table of many kills."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos_lab.orders import KINDS


def write(page: Path, name: str, text: str) -> None:
    """Put a text in the place of the one between a page's marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise ValueError(f"{page} has no place for {name}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of outcomes, one line a kind of kill, and the seeds that went wrong."""
    lines = [
        "| what was done | kills | survived | went on by `resume` | other | wrong "
        "| pause s: median (longest) | end s: median (longest) |",
        "|---|--:|--:|--:|---|--:|--:|--:|",
    ]
    for kind in (*KINDS, None):
        mine = [row for row in rows if kind in (None, row["kind"])]
        if not mine:
            continue
        results = Counter(row["result"] for row in mine if not row["problems"])
        other = ", ".join(
            f"{count} {name}"
            for name, count in sorted(results.items())
            if name not in ("survived", "went on")
        )
        wrong = sum(bool(row["problems"]) for row in mine)
        lines.append(
            f"| {kind or '**all**'} | {len(mine)} | {results['survived']} | {results['went on']} "
            f"| {other or '–'} | {wrong} "
            f"| {_spread(mine, 'pause_seconds')} | {_spread(mine, 'end_seconds')} |"
        )
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

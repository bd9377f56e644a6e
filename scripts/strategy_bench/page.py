"""Turns what was measured into the Markdown of `docs/reference/benchmarks.md`."""

from __future__ import annotations

import statistics
from typing import Any

from benchlib.tables import figure, footnote, mark, median_of, parts, ratio, table

from strategy_bench.measure import loss_at

EXACT = ("single", "ddp", "pipeline", "hybrid")
"""Strategies that `auto` may choose from."""


def strategies(results: dict[str, Any]) -> str:
    """Every strategy with every policy, on every mix."""
    head = ["strategy (emulated)", "policy", "samples/s", "÷ sum of solo", "step, s", "predicted", "off"]
    head += ["MB a step", "loss, equal samples", "loss, equal time", "share of the batch"]
    blocks, runs = [], []
    for mix in results.values():
        rows = mix["rows"]
        runs += [run for row in rows for run in row["runs"]]
        solo = solo_sum(rows)
        shortest = min(run["curve"][-1][0] for row in rows for run in row["runs"])
        title = (
            f"**{mix['title']}**, global batch {mix['global_batch_size']}, {mix['steps']} steps, time × "
            f"{mix['time_scale']:.3g}. Equal time is {shortest:.0f} s, what the fastest needs for all steps."
        )
        cells = [_cells(row, solo, shortest) for row in rows]
        blocks.append("\n".join([title, "", table(head, cells), "", _best(rows)]))
    return "\n\n".join(blocks) + footnote(runs)


def bubbles(results: dict[str, Any]) -> str:
    """Measured bubble of each pipeline beside that of its schedule with the measured stage times."""
    rows = []
    for mix in results.values():
        for row in mix["rows"]:
            found = [run["bubble"] for run in row["runs"] if run["bubble"] is not None]
            if found:
                measured = statistics.median(bubble["measured"] for bubble in found)
                simulated = statistics.median(bubble["simulated"] for bubble in found)
                layers = ", ".join(f"{first}–{end}" for first, end in found[-1]["layers"])
                cells = [mix["title"], row["policy"], found[-1]["schedule"], str(found[-1]["microbatches"])]
                cells += [layers, f"{measured:.3f}", f"{simulated:.3f}", f"{measured / simulated:.3f}"]
                rows.append(cells)
    head = ["mix (emulated)", "policy", "schedule", "microbatches", "layers", "bubble", "simulated", "ratio"]
    return table(head, rows)


def solo_sum(rows: list[dict[str, Any]]) -> float | None:
    """Return what the devices reach alone together, from the runs that measured them."""
    known = [run["solo_samples_per_s"] for row in rows for run in row["runs"] if run["solo_samples_per_s"]]
    return statistics.median(known) if known else None


def _cells(row: dict[str, Any], solo: float | None, shortest: float) -> list[str]:
    runs = row["runs"]
    speed, step = median_of(runs, "samples_per_s"), median_of(runs, "step_s")
    predicted = median_of(runs, "predicted_step_s")
    off = ratio(step, predicted)
    at_time = [loss_at(run["curve"], shortest) for run in runs]
    later = statistics.median(at for at in at_time if at is not None) if None not in at_time else None
    chosen = f" → {runs[-1]['chosen']}" if row["strategy"] == "auto" else ""
    return [
        f"{row['name']}{chosen}{mark(runs)}",
        row["policy"] or "–",
        figure(speed, ",.1f"),
        figure(ratio(speed, solo), ".3f"),
        figure(step, ".3f"),
        figure(predicted, ".3f"),
        figure(off - 1 if off is not None else None, "+.1%"),
        figure(median_of(runs, "bytes_per_step"), ".3f", 1e-6),
        figure(median_of(runs, "final_loss"), ".4f"),
        figure(later, ".4f"),
        parts(runs[-1]["split"]),
    ]


def _best(rows: list[dict[str, Any]]) -> str:
    speeds = {(row["name"], row["policy"]): median_of(row["runs"], "samples_per_s") or 0.0 for row in rows}
    auto = next((row for row in rows if row["strategy"] == "auto"), None)
    if auto is None:
        return ""
    exact = [(row["name"], row["policy"]) for row in rows if row["strategy"] in EXACT]
    name, policy = best = max(exact, key=speeds.__getitem__)
    title = f"{name} with {policy}" if policy else name
    reached = speeds[auto["name"], auto["policy"]] / (speeds[best] or 1.0)
    return f"Of the exact strategies the fastest row is {title}; `auto` reached {reached:.3f} of it."


TABLES = {"strategies": strategies, "bubbles": bubbles}


def render(results: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown of both tables."""
    return {name: make(results["mixes"]) for name, make in TABLES.items()}

"""Turns what was measured into the Markdown of `docs/benchmarks.md`."""

from __future__ import annotations

import statistics
from typing import Any

from strategy_bench.measure import loss_at

EXACT = ("single", "ddp", "pipeline", "hybrid")
"""Strategies that `auto` may choose from."""


def strategies(results: dict[str, Any]) -> str:
    """Every strategy with every policy, on every mix."""
    blocks = []
    for mix in results.values():
        rows = mix["rows"]
        parts = solo_sum(rows)
        shortest = min(run["curve"][-1][0] for row in rows for run in row["runs"])
        lines = [
            f"**{mix['title']}**, global batch {mix['global_batch_size']}, {mix['steps']} steps, time × "
            f"{mix['time_scale']:.3g}. Equal time is {shortest:.0f} s, what the fastest needs for all steps.",
            "",
            "| strategy (emulated) | policy | samples/s | ÷ sum of solo | step, s | predicted | off | "
            "MB a step | loss, equal samples | loss, equal time | share of the batch |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            lines.append(_row(row, parts, shortest))
        blocks.append("\n".join([*lines, "", _best(rows)]))
    lost = [run for mix in results.values() for row in mix["rows"] for run in row["runs"]]
    return "\n\n".join(blocks) + _footnote(lost)


def bubbles(results: dict[str, Any]) -> str:
    """Measured bubble of each pipeline beside that of its schedule with the measured stage times."""
    lines = [
        "| mix (emulated) | policy | schedule | microbatches | layers | bubble | simulated | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mix in results.values():
        for row in mix["rows"]:
            found = [run["bubble"] for run in row["runs"] if run["bubble"] is not None]
            if found:
                measured = statistics.median(one["measured"] for one in found)
                simulated = statistics.median(one["simulated"] for one in found)
                one = found[-1]
                lines.append(
                    f"| {mix['title']} | {row['policy']} | {one['schedule']} | {one['microbatches']} | "
                    f"{', '.join(f'{first}–{end}' for first, end in one['layers'])} | "
                    f"{measured:.3f} | {simulated:.3f} | {measured / simulated:.3f} |"
                )
    return "\n".join(lines)


def solo_sum(rows: list[dict[str, Any]]) -> float | None:
    """Return what the devices reach alone together, as a run that measured them tells."""
    told = [run["solo_samples_per_s"] for row in rows for run in row["runs"] if run["solo_samples_per_s"]]
    return statistics.median(told) if told else None


def _row(row: dict[str, Any], parts: float | None, shortest: float) -> str:
    runs = row["runs"]
    speed = _median(runs, "samples_per_s")
    step = _median(runs, "step_s")
    predicted = _median(runs, "predicted_step_s")
    sent = _median(runs, "bytes_per_step")
    at_time = [loss_at(run["curve"], shortest) for run in runs]
    later = statistics.median(at for at in at_time if at is not None) if None not in at_time else None
    mark = "" if all(run["valid"] for run in runs) else " (!)"
    chosen = f" → {runs[-1]['chosen']}" if row["strategy"] == "auto" else ""
    cells = [
        f"{row['name']}{chosen}{mark}",
        row["policy"] or "–",
        f"{speed:,.1f}",
        _told(speed / parts if parts and speed else None, ".3f"),
        f"{step:.3f}",
        _told(predicted, ".3f"),
        _told(step / predicted - 1 if predicted and step else None, "+.1%"),
        _told(sent / 1e6 if sent is not None else None, ".3f"),
        _told(_median(runs, "final_loss"), ".4f"),
        _told(later, ".4f"),
        " / ".join("–" if one is None else str(one) for one in runs[-1]["split"]),
    ]
    return f"| {' | '.join(cells)} |"


def _best(rows: list[dict[str, Any]]) -> str:
    exact = [row for row in rows if row["strategy"] in EXACT]
    best = max(exact, key=lambda row: _median(row["runs"], "samples_per_s") or 0.0)
    auto = next((row for row in rows if row["strategy"] == "auto"), None)
    if auto is None:
        return ""
    reached = (_median(auto["runs"], "samples_per_s") or 0.0) / (
        _median(best["runs"], "samples_per_s") or 1.0
    )
    told = f"{best['name']} with {best['policy']}" if best["policy"] else best["name"]
    return f"Of the exact strategies the fastest row is {told}; `auto` reached {reached:.3f} of it."


def _median(runs: list[dict[str, Any]], key: str) -> float | None:
    values = [run[key] for run in runs]
    return statistics.median(values) if values and None not in values else None


def _told(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _footnote(runs: list[dict[str, Any]]) -> str:
    lost = sum(not run["valid"] for run in runs)
    if not lost:
        return ""
    return (
        f"\n\n(!) {lost} of {len(runs)} runs were outrun: this machine was more than 2 % late on a pass or a "
        "link, and the figure is a little low."
    )


TABLES = {"strategies": strategies, "bubbles": bubbles}


def render(results: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown of both tables."""
    return {name: table(results["mixes"]) for name, table in TABLES.items()}

"""Turns what was measured into the Markdown of `docs/benchmarks.md`."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- {name}: begin -->", "<!-- {name}: end -->"
"""Around each table in the page, so that it can be replaced."""


def mixes(results: dict[str, Any]) -> str:
    """Every mix: what it allows, then what each policy and each other framework reached."""
    blocks = []
    for mix in results.values():
        facts, rows = mix["facts"], mix["runs"]
        ceiling, parts = facts["ceiling_samples_per_s"], sum(facts["solo_samples_per_s"])
        equal = _speed(rows.get("equal"))
        lines = [
            f"**{facts['title']}**, global batch {facts['global_batch_size']}, "
            f"time × {facts['time_scale']:.3g}. {_allowed(facts)}",
            "",
            "| emulated | samples/s | min–max | ÷ ceiling | ÷ sum of solo | of possible gain | split |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, runs in rows.items():
            if not runs:
                continue
            speed = _speed(runs)
            speeds = [run["samples_per_s"] for run in runs]
            gain = (
                f"{(speed - equal) / (ceiling - equal):.3f}"
                if speed is not None and equal is not None and ceiling > equal and name != "equal"
                else "–"
            )
            lines.append(
                f"| {name}{_mark(runs)} | {speed:,.1f} | {min(speeds):,.1f}–{max(speeds):,.1f} | "
                f"{speed / ceiling:.3f} | {speed / parts:.3f} | {gain} | {_split(runs[-1]['split'])} |"
            )
        told = {reason for runs in rows.values() for run in runs for reason in run.get("left_out", [])}
        lines += ["", *(f"Told: “{reason}”" for reason in sorted(told)[:1])] if told else []
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + _footnote(
        [run for mix in results.values() for runs in mix["runs"].values() for run in runs]
    )


def _allowed(facts: dict[str, Any]) -> str:
    ceiling, solo = facts["ceiling_samples_per_s"], facts["solo_samples_per_s"]
    tried = "all splits tried" if facts["exhaustive"] else "solver, then sample by sample"
    return (
        f"Ceiling {ceiling:,.1f} samples/s with {_split(facts['best_split'])} ({tried}), a step of "
        f"{facts['best_step_s']:.2f} s: {ceiling / sum(solo):.3f} of the sum of solo throughputs "
        f"({' + '.join(f'{one:,.1f}' for one in solo)}), {ceiling / max(solo):.2f}× the fastest card. "
        f"By the closed form fixed costs allow {facts['closed_form']:.3f}; rounding takes "
        f"{facts['lost_to_rounding']:.3f}, links the rest. Jitter, no part of the ceiling, lengthens its "
        f"step by {facts['jitter']:.1%}."
    )


def rivals(results: dict[str, Any]) -> str:
    """Our throughput ÷ theirs."""
    ours = ("profiled", "adaptive", "auto")
    theirs = ("plain DDP", "Accelerate")
    lines = [
        "| mix (emulated) | ours | samples/s | ÷ plain DDP | ÷ Accelerate |",
        "|---|---|---|---|---|",
    ]
    used: list[dict[str, Any]] = []
    for mix in results.values():
        runs = mix["runs"]
        for policy in ours:
            speed = _speed(runs.get(policy))
            if speed is None:
                continue
            others = [_speed(runs.get(name)) for name in theirs]
            used += [run for name in (policy, *theirs) for run in runs.get(name, [])]
            ratios = " | ".join("–" if other is None else f"{speed / other:.2f}×" for other in others)
            lines.append(
                f"| {mix['facts']['title']} | {policy}{_mark(runs[policy])} | {speed:,.1f} | {ratios} |"
            )
    return "\n".join(lines) + _footnote(used)


def regret(results: dict[str, Any]) -> str:
    """The chosen split against the best one, in the model and measured."""
    lines = ["| | mixes | regret |", "|---|---|---|"]
    for model in results["model"]:
        lines.append(
            f"| in the model, {model['cards']} random cards | {model['mixes']:,} | "
            f"median {model['median']:.2%}, p95 {model['p95']:.2%}, worst {model['worst']:.2%} |"
        )
    for title, one in results["mixes"].items():
        lines += [
            f"| in the model, {title}: {_split(one['chosen'])} against {_split(one['best'])} | 1 | "
            f"{one['regret_in_the_model']:.2%} |",
            f"| measured, the same two | 1 | {one['regret_measured']:+.2%} |",
        ]
    return "\n".join(lines) + _footnote(list(results["mixes"].values()))


def prediction(results: dict[str, Any]) -> str:
    """Predicted against measured step time of splits that were not profiled."""
    lines = [
        "| mix (emulated) | splits | median error | p95 | worst | mean, signed |",
        "|---|---|---|---|---|---|",
    ]
    everything: list[float] = []
    for title, one in results.items():
        errors = [row["predicted_s"] / row["measured_s"] - 1 for row in one["rows"]]
        everything += errors
        lines.append(_errors(f"{title}", errors))
    if len(results) > 1:
        lines.append(_errors("all", everything))
    return "\n".join(lines) + _footnote(list(results.values()))


def _errors(title: str, errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    return (
        f"| {title} | {len(errors)} | {statistics.median(sizes):.1%} | {percentile(sizes, 0.95):.1%} | "
        f"{sizes[-1]:.1%} | {statistics.fmean(errors):+.1%} |"
    )


def percentile(rising: list[float], part: float) -> float:
    """Return the smallest value that so large a part of the values does not exceed."""
    return rising[max(math.ceil(part * len(rising)) - 1, 0)]


def slowdown(results: dict[str, Any]) -> str:
    """How soon a slowed device's share follows."""
    lines = [
        "| mix (emulated) | steps until re-balanced, slowed 2× | restored | losses differ by at most |",
        "|---|---|---|---|",
    ]
    for title, runs in results.items():
        there, back = zip(*(run["steps_to_rebalance"] for run in runs), strict=True)
        difference = max(run["largest_difference_of_losses"] for run in runs)
        lines.append(f"| {title} | {_steps(there)} | {_steps(back)} | {difference:.1e} |")
    return "\n".join(lines) + _footnote([run for runs in results.values() for run in runs])


def _steps(found: tuple[int | None, ...]) -> str:
    return ", ".join("never" if steps is None else str(steps) for steps in found)


def alone(results: dict[str, Any]) -> str:
    """The mix against its fast card by itself."""
    solo = _speed(results["runs"]["alone"])
    lines = [
        "| RTX 4090 + Arc A380 (emulated), 1 Gb/s | samples/s | ÷ RTX 4090 alone | split |",
        "|---|---|---|---|",
    ]
    for name, runs in results["runs"].items():
        speed = _speed(runs)
        if speed is not None and solo is not None:
            split = _split(runs[-1].get("split") or results["facts"]["best_split"][:0]) or "–"
            lines.append(f"| {name}{_mark(runs)} | {speed:,.1f} | {speed / solo:.3f} | {split} |")
    told = sorted(
        {reason for runs in results["runs"].values() for run in runs for reason in run.get("left_out", [])}
    )
    return "\n".join([*lines, "", *(f"Told: “{reason}”" for reason in told[:1])])


TABLES = {
    "mixes": mixes,
    "rivals": rivals,
    "regret": regret,
    "prediction": prediction,
    "slowdown": slowdown,
    "alone": alone,
}


def render(results: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown of every table that there are results of."""
    return {name: table(results[name]) for name, table in TABLES.items() if results.get(name)}


def write(path: Path, tables: dict[str, str]) -> None:
    """Put tables between their marks in a page.

    Raises:
        ValueError: the page has no place for one.
    """
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{path} must hold {begin} and {end} once, so that the table has a place")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    path.write_text(text, encoding="utf-8")


def _speed(runs: list[dict[str, Any]] | None) -> float | None:
    return statistics.median(run["samples_per_s"] for run in runs) if runs else None


def _split(counts: list[int]) -> str:
    return " / ".join(map(str, counts))


def _mark(runs: list[dict[str, Any]]) -> str:
    return "" if all(run["valid"] for run in runs) else " (!)"


def _footnote(runs: list[dict[str, Any]]) -> str:
    lost = sum(not run["valid"] for run in runs)
    if not lost:
        return ""
    return (
        f"\n\n(!) {lost} of {len(runs)} runs were outrun: this machine was more than 2 % late on a pass or a "
        "link, and the figure is a little low."
    )

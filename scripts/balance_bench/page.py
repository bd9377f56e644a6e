"""Turns what was measured into the Markdown of `docs/reference/benchmarks.md`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchlib.tables import figure, footnote, mark, median_of, parts, ratio, table


def mixes(results: dict[str, Any]) -> str:
    """Every mix: what it allows, then what each policy and each other framework reached."""
    head = ["emulated", "samples/s", "min–max", "÷ ceiling", "÷ sum of solo", "of possible gain", "split"]
    blocks = []
    for mix in results.values():
        facts, entrants = mix["facts"], mix["runs"]
        ceiling, solo = facts["ceiling_samples_per_s"], sum(facts["solo_samples_per_s"])
        equal = _speed(entrants.get("equal"))
        rows = []
        for name, runs in entrants.items():
            speed = _speed(runs)
            if speed is None:
                continue
            speeds = [run["samples_per_s"] for run in runs]
            gains = equal is not None and ceiling > equal and name != "equal"
            rows.append(
                [
                    f"{name}{mark(runs)}",
                    f"{speed:,.1f}",
                    f"{min(speeds):,.1f}–{max(speeds):,.1f}",
                    f"{speed / ceiling:.3f}",
                    f"{speed / solo:.3f}",
                    f"{(speed - equal) / (ceiling - equal):.3f}" if gains and equal is not None else "–",
                    parts(runs[-1]["split"]),
                ]
            )
        title = f"**{facts['title']}**, global batch {facts['global_batch_size']}, "
        title += f"time × {facts['time_scale']:.3g}. {_allowed(facts)}"
        blocks.append("\n".join([title, "", table(head, rows), *_left_out(entrants)]))
    return "\n\n".join(blocks) + footnote(_all_runs(results))


def _left_out(entrants: dict[str, Any]) -> list[str]:
    """Quote a run that says why it left a device out."""
    reasons = {reason for runs in entrants.values() for run in runs for reason in run.get("left_out", [])}
    return ["", *(f"The plan says: “{reason}”" for reason in sorted(reasons)[:1])] if reasons else []


def _all_runs(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for mix in results.values() for runs in mix["runs"].values() for run in runs]


def _allowed(facts: dict[str, Any]) -> str:
    ceiling, solo = facts["ceiling_samples_per_s"], facts["solo_samples_per_s"]
    tried = "all splits tried" if facts["exhaustive"] else "solver, then sample by sample"
    return (
        f"Ceiling {ceiling:,.1f} samples/s with {parts(facts['best_split'])} ({tried}), a step of "
        f"{facts['best_step_s']:.2f} s: {ceiling / sum(solo):.3f} of the sum of solo throughputs "
        f"({' + '.join(f'{one:,.1f}' for one in solo)}), {ceiling / max(solo):.2f}× the fastest card. "
        f"By the closed form fixed costs allow {facts['closed_form']:.3f}; rounding takes "
        f"{facts['lost_to_rounding']:.3f}, links the rest. Jitter, no part of the ceiling, lengthens its "
        f"step by {facts['jitter']:.1%}."
    )


def rivals(results: dict[str, Any]) -> str:
    """Our throughput ÷ theirs."""
    theirs = ("plain DDP", "Accelerate")
    rows, used = [], []
    for mix in results.values():
        runs = mix["runs"]
        for policy in ("profiled", "adaptive", "auto"):
            speed = _speed(runs.get(policy))
            if speed is None:
                continue
            used += [run for name in (policy, *theirs) for run in runs.get(name, [])]
            ratios = [figure(ratio(speed, _speed(runs.get(name))), ".2f") for name in theirs]
            cells = [mix["facts"]["title"], f"{policy}{mark(runs[policy])}", f"{speed:,.1f}"]
            rows.append([*cells, *(cell if cell == "–" else f"{cell}×" for cell in ratios)])
    head = ["mix (emulated)", "ours", "samples/s", *(f"÷ {name}" for name in theirs)]
    return table(head, rows) + footnote(used)


def regret(results: dict[str, Any]) -> str:
    """The chosen split against the best one, in the model and measured."""
    rows = [
        [title, f"{parts(mix['chosen'])} against {parts(mix['best'])}"]
        + [f"{mix['regret_in_the_model']:.2%}", f"{mix['regret_measured']:+.2%}"]
        for title, mix in results.items()
    ]
    head = ["mix (emulated)", "splits", "regret in the model", "measured"]
    return table(head, rows) + footnote(list(results.values()))


def prediction(results: dict[str, Any]) -> str:
    """Predicted against measured step time of splits that were not profiled."""
    errors = {
        title: [split["predicted_s"] / split["measured_s"] - 1 for split in mix["rows"]]
        for title, mix in results.items()
    }
    if len(errors) > 1:
        errors["all"] = [error for some in errors.values() for error in some]
    head = ["mix (emulated)", "splits", "median error", "p95", "worst", "mean, signed"]
    rows = [[title, *_errors(some)] for title, some in errors.items()]
    return table(head, rows) + footnote(list(results.values()))


def _errors(errors: list[float]) -> list[str]:
    sizes = sorted(map(abs, errors))
    spread = [statistics.median(sizes), percentile(sizes, 0.95), sizes[-1]]
    return [str(len(errors)), *(f"{size:.1%}" for size in spread), f"{statistics.fmean(errors):+.1%}"]


def percentile(rising: list[float], part: float) -> float:
    """Return the smallest value that so large a part of the values does not exceed."""
    return rising[max(math.ceil(part * len(rising)) - 1, 0)]


def slowdown(results: dict[str, Any]) -> str:
    """How soon a slowed device's share follows."""
    rows = []
    for title, runs in results.items():
        slowed, restored = zip(*(run["steps_to_rebalance"] for run in runs), strict=True)
        difference = max(run["largest_difference_of_losses"] for run in runs)
        rows.append([title, _steps(slowed), _steps(restored), f"{difference:.1e}"])
    head = ["mix (emulated)", "steps until re-balanced, slowed 2×", "restored", "losses differ by at most"]
    return table(head, rows) + footnote([run for runs in results.values() for run in runs])


def _steps(found: tuple[int | None, ...]) -> str:
    return ", ".join("never" if steps is None else str(steps) for steps in found)


def alone(results: dict[str, Any]) -> str:
    """The mix against its fast card by itself."""
    entrants = results["runs"]
    solo, rows = _speed(entrants["alone"]), []
    for name, runs in entrants.items():
        speed = _speed(runs)
        if speed is not None and solo is not None:
            cells = [f"{name}{mark(runs)}", f"{speed:,.1f}", f"{speed / solo:.3f}"]
            rows.append([*cells, parts(runs[-1].get("split", [])) or "–"])
    head = ["RTX 4090 + Arc A380 (emulated), 1 Gb/s", "samples/s", "÷ RTX 4090 alone", "split"]
    return "\n".join([table(head, rows), *_left_out(entrants)])


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
    return {name: make(results[name]) for name, make in TABLES.items() if results.get(name)}


def _speed(runs: list[dict[str, Any]] | None) -> float | None:
    return median_of(runs, "samples_per_s")

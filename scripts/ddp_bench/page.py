"""What was measured, as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchlib.tables import figure, median_of, ratio, table

GIB = 2**30


def where(devices: Sequence[str], torch: str) -> str:
    """Return the line above a table: on what it was measured."""
    counts = {name: list(devices).count(name) for name in devices}
    names = ", ".join(f"{count} × {name}" for name, count in counts.items())
    return f"{names}; torch {torch}"


def memory(runs: Sequence[dict[str, Any]]) -> str:
    """Return the peak memory of the device that held the most."""
    return figure(median_of(runs, "peak_memory_bytes"), ".2f", 1 / GIB)


def busy(runs: Sequence[dict[str, Any]]) -> str:
    """Return the utilisation of each device in the last run."""
    return " / ".join(figure(one, ".0%") for one in runs[-1]["utilisation"])


def compared(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]] | None, key: str) -> str:
    """Return a figure's median over some runs ÷ that over others, if these ran."""
    return figure(ratio(median_of(one, key), median_of(other, key)), ".3f")


def ddp(results: dict[str, Any]) -> str:
    """hetexp's `ddp` beside the plain script."""
    facts, plain = results["facts"], results["runs"]["plain"]
    rows = []
    for name, title in (("plain", "plain torch DDP"), ("ours", "`strategy=ddp`")):
        runs = results["runs"][name]
        speeds = [run["samples_per_s"] for run in runs]
        rows.append(
            [
                title,
                figure(median_of(runs, "samples_per_s"), ",.1f"),
                f"{min(speeds):,.1f}–{max(speeds):,.1f}",
                figure(median_of(runs, "tokens_per_s"), ",.0f"),
                figure(median_of(runs, "step_s"), ",.2f", 1e3),
                compared(runs, plain, "samples_per_s"),
                memory(runs),
                compared(runs, plain, "peak_memory_bytes"),
                busy(runs),
            ]
        )
    head = ["", "samples/s", "min–max", "tokens/s", "step, ms", "÷ plain", "peak GiB", "÷ plain", "busy"]
    title = (
        f"{where(plain[-1]['devices'], plain[-1]['torch'])}. {facts['parameters']:,} weights, "
        f"{facts['sample']}, {facts['local_batch']} samples a device, {facts['precision']}, "
        f"{facts['steps']} steps after {facts['warm_steps']}; medians of {len(plain)} runs in turn."
    )
    return "\n".join([title, "", table(head, rows)])


def scaling(results: dict[str, Any]) -> str:
    """One device against several."""
    facts = results["facts"]
    rows = []
    for entrant, by_name in results["runs"].items():
        alone = median_of(by_name["1"], "samples_per_s")
        for name, runs in by_name.items():
            count = len(runs[-1]["utilisation"])
            gain = ratio(median_of(runs, "samples_per_s"), alone)
            rows.append(
                [
                    entrant,
                    name,
                    str(runs[-1]["global_batch"] // count),
                    figure(median_of(runs, "samples_per_s"), ",.1f"),
                    figure(median_of(runs, "step_s"), ",.2f", 1e3),
                    figure(gain, ".3f"),
                    figure(ratio(gain, float(count)), ".3f"),
                    compared(runs, results["runs"].get("plain", {}).get(name), "samples_per_s"),
                    memory(runs),
                    busy(runs),
                ]
            )
    first = next(iter(results["runs"].values()))
    runs = list(first.values())[-1]
    last = runs[-1]
    head = ["", "devices", "samples each", "samples/s", "step, ms", "÷ one", "efficiency"]
    head += ["÷ plain", "peak GiB", "busy"]
    title = (
        f"{where(last['devices'], last['torch'])}. {facts['parameters']:,} weights, "
        f"{facts['sample']}, {facts['precision']}; medians of {len(runs)} runs in turn."
    )
    return "\n".join([title, "", table(head, rows)])

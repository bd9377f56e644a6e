"""What was measured, as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp_bench.runs import median_of

GIB = 2**30


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def told(value: float | None, form: str) -> str:
    """Return a figure, `–` for one that nobody tells."""
    return "–" if value is None or math.isnan(value) else format(value, form)


def ratio(one: float | None, other: float | None) -> float | None:
    """Return one ÷ other, `None` where either is not known."""
    return one / other if one is not None and other else None


def where(devices: Sequence[str], torch: str) -> str:
    """Return the line above a table: on what it was measured."""
    counts = {name: list(devices).count(name) for name in devices}
    names = ", ".join(f"{count} × {name}" for name, count in counts.items())
    return f"{names}; torch {torch}"


def memory(runs: Sequence[dict[str, Any]]) -> str:
    """Return the peak memory of the device that held the most."""
    held = median_of(runs, "peak_memory_bytes")
    return told(held / GIB if held is not None else None, ".2f")


def busy(runs: Sequence[dict[str, Any]]) -> str:
    """Return the utilisation of each device in the last run."""
    return " / ".join(told(one, ".0%") for one in runs[-1]["utilisation"])


def ddp(results: dict[str, Any]) -> str:
    """hetexp's `ddp` beside the plain script."""
    runs, facts = results["runs"], results["facts"]
    plain = runs["plain"]
    rows = []
    for name, title in (("plain", "plain torch DDP"), ("ours", "`strategy=ddp`")):
        of = runs[name]
        speeds = [run["samples_per_s"] for run in of]
        rows.append(
            [
                title,
                told(median_of(of, "samples_per_s"), ",.1f"),
                f"{min(speeds):,.1f}–{max(speeds):,.1f}",
                told(median_of(of, "tokens_per_s"), ",.0f"),
                told(_times(median_of(of, "step_s"), 1e3), ",.2f"),
                told(ratio(median_of(of, "samples_per_s"), median_of(plain, "samples_per_s")), ".3f"),
                memory(of),
                told(ratio(median_of(of, "peak_memory_bytes"), median_of(plain, "peak_memory_bytes")), ".3f"),
                busy(of),
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
    for entrant in results["runs"]:
        base = results["runs"][entrant]["1"]
        alone = median_of(base, "samples_per_s")
        for name, of in results["runs"][entrant].items():
            count = len(of[-1]["utilisation"])
            gain = ratio(median_of(of, "samples_per_s"), alone)
            rows.append(
                [
                    entrant,
                    name,
                    str(of[-1]["global_batch"] // count),
                    told(median_of(of, "samples_per_s"), ",.1f"),
                    told(_times(median_of(of, "step_s"), 1e3), ",.2f"),
                    told(gain, ".3f"),
                    told(ratio(gain, float(count)), ".3f"),
                    told(_beside_plain(results["runs"], entrant, name), ".3f"),
                    memory(of),
                    busy(of),
                ]
            )
    last = list(next(iter(results["runs"].values())).values())[-1][-1]
    head = ["", "devices", "samples each", "samples/s", "step, ms", "÷ one", "efficiency"]
    head += ["÷ plain", "peak GiB", "busy"]
    title = (
        f"{where(last['devices'], last['torch'])}. {facts['parameters']:,} weights, "
        f"{facts['sample']}, {facts['precision']}; medians of {len(base)} runs in turn."
    )
    return "\n".join([title, "", table(head, rows)])


def _beside_plain(runs: dict[str, dict[str, list[dict[str, Any]]]], entrant: str, name: str) -> float | None:
    """Return the speed ÷ the plain script's with the same devices and samples, where it ran."""
    if "plain" not in runs:
        return None
    return ratio(
        median_of(runs[entrant][name], "samples_per_s"), median_of(runs["plain"][name], "samples_per_s")
    )


def _times(value: float | None, factor: float) -> float | None:
    return value * factor if value is not None else None

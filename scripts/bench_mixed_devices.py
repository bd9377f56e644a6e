"""Throughput of one GPT on this machine's card, its CPU, and both together, side by side in one run.

    python scripts/bench_mixed_devices.py [--repeats 3] [--steps 30] [--output table.md]

The shares of the mixed runs are what the two solo runs of the same repeat measured. Real devices only.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.app import compose_config, run
from hetexp.plan.run_spec import Request

MODEL = [
    "model=gpt",
    "model.num_layers=6",
    "model.num_heads=6",
    "model.embedding_size=384",
    "data=text",
    "data.sequence_length=256",
    "trainer.global_batch_size=256",
    "trainer.microbatch_size=64",
    "trainer.max_epochs=null",
    "trainer.log_every=5",
    "logger=none",
]


def measure(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Run once and return the summary."""
    cfg = compose_config([*MODEL, *overrides])
    return run(cfg, Request(folder, Path.cwd(), overrides=tuple(overrides)), Console(file=io.StringIO()))


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cpu-steps", type=int, default=6, help="fewer: the CPU alone is slow")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for repeat in range(arguments.repeats):
            folder = Path(temporary, str(repeat))
            steps = f"trainer.max_steps={arguments.steps}"
            card = measure(folder / "card", ["hardware.devices=[cuda:0]", steps])
            cpu = measure(folder / "cpu", ["hardware=cpu", f"trainer.max_steps={arguments.cpu_steps}"])
            speeds = [card["devices"][0]["samples_per_s"], cpu["devices"][0]["samples_per_s"]]
            mixed = ["hardware.devices=[cuda:0,cpu]", steps]
            weights = [*mixed, "balancing=manual", f"balancing.weights={speeds}"]
            for name, summary in (
                ("card alone", card),
                ("CPU alone", cpu),
                ("both, equal shares", measure(folder / "equal", [mixed[0], "trainer.max_steps=4"])),
                ("both, shares as measured", measure(folder / "weighted", weights)),
            ):
                rows.setdefault(name, []).append(summary)
    lines = [
        "| devices | samples/s (median of runs) | min–max | shares | waiting, s |",
        "|---|---|---|---|---|",
    ]
    for name, summaries in rows.items():
        speeds = [summary["samples_per_s"] for summary in summaries]
        shares = " / ".join(str(device["local_batch"]) for device in summaries[-1]["devices"])
        idle = " / ".join(f"{device['idle_s']:.1f}" for device in summaries[-1]["devices"])
        span = f"{min(speeds):,.1f}–{max(speeds):,.1f}"
        lines.append(f"| {name} | {statistics.median(speeds):,.1f} | {span} | {shares} | {idle} |")
    last = rows["both, equal shares"][-1]
    names = ", ".join(device["name"] for device in last["devices"])
    table = "\n".join([f"{names}; torch {last['versions']['torch']}", "", *lines])
    print(table)
    if arguments.output is not None:
        arguments.output.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

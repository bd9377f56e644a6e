"""How long `hetexp report` takes for a large sweep.

    python benchmarks/bench_report.py RUN [--runs 200] [--lines 500] [--keep FOLDER]

RUN is the folder of a run that completed. It is copied as a sweep of strategies × policies × seeds, with
other numbers in each copy's summary and log, and so many lines in the log. Printed are the seconds of the
command, in a process of its own, and the size of what it wrote.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hetexp.core.sweep.folder import SweepRow, append_row

SEEDS = 5
STRATEGIES = ("ddp", "pipeline", "local_sgd", "hybrid", "independent", "dp", "single", "auto")
POLICIES = ("equal", "profiled", "adaptive", "tflops", "vram")


def make_sweep(run: Path, sweep: Path, count: int, lines: int | None = None) -> None:
    """Copy a run as a sweep of so many.

    Args:
        run: its folder.
        sweep: folder to make.
        lines: of each log; `None`: as many as the run's has.
    """
    draw = random.Random(0)
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    log = log if lines is None else stretched(log, lines)
    ways = itertools.product(range(count), STRATEGIES, POLICIES, range(SEEDS))
    for job, (more, strategy, policy, seed) in enumerate(itertools.islice(ways, count)):
        words = (
            f"balancing={policy}",
            f"strategy={strategy}",
            f"trainer.seed={seed}",
            f"optimizer.lr={1 + more}",
        )
        folder = sweep / str(job)
        folder.mkdir(parents=True)
        factor = draw.uniform(0.5, 2.0)
        choices = {**plan["choices"], "strategy": strategy, "balancing": policy}
        config = {**plan["config"], "trainer": {**plan["config"]["trainer"], "seed": seed}}
        own = {**plan, "choices": choices, "config": config, "overrides": words, "run_id": f"copy-{job}"}
        (folder / "plan.json").write_text(json.dumps(own))
        (folder / "summary.json").write_text(
            json.dumps(faster(summary, factor) | {"seed": seed, "valid": True})
        )
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(faster(line, factor)) + "\n" for line in log)
        )
        append_row(sweep, SweepRow(job, tuple(sorted(words)), folder.name, "completed", None, "2026", 1.0))


def stretched(log: list[dict[str, Any]], lines: int) -> list[dict[str, Any]]:
    """Return a log with so many lines, whose steps and samples go on."""
    last, samples = log[-1]["step"], max(line.get("train/samples", 0) for line in log)
    found = []
    for number in range(lines):
        turn, place = divmod(number, len(log))
        line = dict(log[place])
        line["step"] += turn * last
        if "train/samples" in line:
            line["train/samples"] += turn * samples
        found.append(line)
    return found


def faster(values: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return a summary or log line of a run that was so many times as fast, with other losses."""
    quicker, slower = ("samples_per_s", "samples_per_second"), ("measured_step_s", "step_seconds")
    changed = dict(values)
    for key, value in values.items():
        if key in quicker:
            changed[key] = value * factor
        elif key in slower:
            changed[key] = value / factor
        elif key in ("train/loss", "eval/loss") and value is not None:
            changed[key] = value * (1 + factor / 100)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--keep", type=Path, help="folder for the sweep and its report, instead of none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sweep = (options.keep or Path(temporary)) / "sweep"
        make_sweep(options.run, sweep, options.runs, options.lines)
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "hetexp.cli", "report", str(sweep)], check=True)
        took = time.perf_counter() - started
        written = [*sweep.glob("report.*"), *sweep.glob("*.csv")]
        sizes = ", ".join(f"{path.name} {path.stat().st_size / 2**20:.1f} MiB" for path in sorted(written))
        print(f"{options.runs} runs of {options.lines} log lines: {took:.1f} s; {sizes}")


if __name__ == "__main__":
    main()

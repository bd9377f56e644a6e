"""Balancing on real cards: predicted against measured, the ceiling against what was reached, who takes part.

    python scripts/bench_gpu_balancing.py [--parts slowed,splits,equal,cpu] [--output tables.md]
    python scripts/bench_gpu_balancing.py --parts slowed,equal --gpus 4 --slow 2,4

Needs two equal NVIDIA cards, or as many as `--gpus` says. `slowed` makes the last ones slower than they are
(`slow:`), by 2.7 or the factors of `--slow`; `splits` runs splits of these two that were not measured,
`equal` takes all as they are, `cpu` one card and the CPU. The step time of a run is the median over its log
windows but the first two.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.app import compose_config, run
from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.core.plan import Plan
from hetexp.hardware.links import links_of
from hetexp.plan.run_spec import Request

MODEL = (
    "model=gpt",
    "model.num_layers=12",
    "model.num_heads=16",
    "model.embedding_size=1024",
    "data=text",
    "data.sequence_length=512",
    "trainer.drop_last=true",
    "trainer.precision=bfloat16",
    "trainer.max_epochs=null",
    "trainer.log_every=4",
    "hardware.check_memory=false",
    "launch.start_method=forkserver",
    "logger=none",
)
TOTAL = 256
SPLITS = (250, 244, 238, 230, 220, 212, 204, 196, 180, 160, 140, 128)
"""Of 256 samples, those of the first card."""
STEPS = 28


@dataclass
class Run:
    """What one run left behind."""

    folder: Path
    summary: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return Plan.read(self.folder / "plan.json")

    @property
    def step_seconds(self) -> float:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        windows = [row["step_seconds"] for row in map(json.loads, lines) if "step_seconds" in row]
        return float(statistics.median(windows[2:]))

    @property
    def split(self) -> str:
        return " / ".join(f"{d['id']} {d['local_batch']}" for d in self.summary["devices"])


class Bench:
    """Runs and the table of what they gave."""

    def __init__(self, folder: Path, gpus: int, slow: Sequence[float]) -> None:
        self.all = f"hardware.devices=[{','.join(f'cuda:{index}' for index in range(gpus))}]"
        factors = (*[1.0] * (gpus - len(slow)), *slow)
        cards = [
            f"cuda:{index}" if factor == 1.0 else f"{{device:'cuda:{index}',slow:{factor:g}}}"
            for index, factor in enumerate(factors)
        ]
        self.slowed = f"hardware.devices=[{','.join(cards)}]"
        self.slow = slow
        self._folder = folder
        self._count = 0
        self.lines: list[str] = []

    def run(self, *overrides: str, steps: int = STEPS, total: int = TOTAL) -> Run:
        self._count += 1
        folder = self._folder / str(self._count)
        words = (*MODEL, f"trainer.max_steps={steps}", f"trainer.global_batch_size={total}", *overrides)
        screen = Console(file=io.StringIO(), width=200)
        summary = run(compose_config(words), Request(folder, Path.cwd(), overrides=words), screen)
        return Run(folder, summary)

    def say(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
        self.lines += lines

    def row(self, name: str, done: Run, total: int = TOTAL) -> None:
        summary, step = done.summary, done.step_seconds
        ceiling, predicted = summary["ceiling"], summary["predicted_step_s"]
        best = predicted / step if predicted is not None else None
        cells = [name, done.split, f"{1000 * step:.1f}", f"{total / step:,.0f}", _number(predicted, 1000)]
        self.say(f"| {' | '.join([*cells, _number(ceiling), _number(best)])} |")

    def head(self) -> None:
        self.say(
            "",
            "| run | samples a step | step, ms | samples/s | predicted, ms | ceiling | reached of it |",
            "|---|---|---|---|---|---|---|",
        )


def _number(value: float | None, factor: float = 1.0) -> str:
    return "–" if value is None else f"{value * factor:.3g}" if factor == 1.0 else f"{value * factor:.1f}"


def slowed(bench: Bench) -> Run:
    """Some cards are slower: what is chosen, and what that reaches."""
    bench.say("", f"The last {len(bench.slow)} of the cards slower by {list(bench.slow)}:")
    bench.head()
    bench.row("first card alone", bench.run("hardware.devices=[cuda:0]", "balancing=equal"))
    bench.row("equal shares", bench.run(bench.slowed, "balancing=equal"))
    profiled = bench.run(bench.slowed, "balancing=profiled", "balancing.recalibrate=true")
    bench.row("profiled", profiled)
    bench.row(
        "adaptive, no calibration",
        bench.run(bench.slowed, "balancing=adaptive", "balancing.recalibrate=true"),
    )
    for reason in profiled.plan.reasons[:3]:
        bench.say(f"· {reason}")
    return profiled


def splits(bench: Bench, profiled: Run | None) -> None:
    """Splits that were not measured: predicted against measured."""
    calibrated = profiled or bench.run(bench.slowed, "balancing=profiled", "balancing.recalibrate=true")
    plan = calibrated.plan
    if plan.calibration is None or plan.world_size != 2:
        bench.say("Not two cards took part: no splits to predict.")
        return
    devices = [DeviceCalibration.from_dict(one) for one in plan.calibration["devices"]]
    exchange = Exchange.from_dict(plan.calibration["exchange"])
    links = links_of(plan, measured=exchange.measured)
    errors = []
    bench.say("", "| samples a step | predicted, ms | measured, ms | error |", "|---|---|---|---|")
    for first in SPLITS:
        counts = (first, TOTAL - first)
        predicted = joint_seconds(devices, counts, links, exchange)
        weights = f"balancing.weights=[{counts[0]},{counts[1]}]"
        measured = bench.run(bench.slowed, "balancing=manual", weights, steps=20).step_seconds
        errors.append(abs(predicted / measured - 1))
        bench.say(
            f"| {counts[0]} / {counts[1]} | {1000 * predicted:.1f} | {1000 * measured:.1f} | "
            f"{predicted / measured - 1:+.1%} |"
        )
    errors.sort()
    p95 = errors[min(len(errors) - 1, round(0.95 * (len(errors) - 1)))]
    bench.say(f"Error of {len(errors)} splits: median {statistics.median(errors):.1%}, p95 {p95:.1%}.")


def equal(bench: Bench) -> None:
    """The cards as they are."""
    bench.head()
    bench.row("one card", bench.run("hardware.devices=[cuda:0]", "balancing=equal"))
    bench.row("all, equal", bench.run(bench.all, "balancing=equal"))
    bench.row("all, profiled", bench.run(bench.all, "balancing=profiled", "balancing.recalibrate=true"))


def cpu(bench: Bench) -> None:
    """A card and the CPU: whether the CPU takes part, and what both choices really take."""
    bench.head()
    mixed, anew = "hardware.devices=[cuda:0,cpu]", "balancing.recalibrate=true"
    # A smaller model: the large one takes the CPU seconds a sample. Each device has its own precision.
    own = ("trainer.precision=auto", "model.num_layers=6", "model.num_heads=6", "model.embedding_size=384")
    bench.row("card alone", bench.run("hardware.devices=[cuda:0]", "balancing=equal", *own))
    profiled = bench.run(mixed, "balancing=profiled", anew, *own)
    bench.row("card and CPU, profiled", profiled)
    forced = bench.run(mixed, "balancing=profiled", anew, "balancing.drop_slower=false", *own)
    bench.row("card and CPU, nobody left out", forced)
    one = bench.run(mixed, "balancing=manual", f"balancing.weights=[{TOTAL - 1},1]", *own, steps=12)
    bench.row("card and CPU, one sample for the CPU", one)
    for reason in profiled.plan.reasons[:2]:
        bench.say(f"· {reason}")


def main(given: list[str] | None = None) -> None:
    """Run the chosen parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default="slowed,splits,equal,cpu")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--slow", type=lambda text: [float(one) for one in text.split(",")], default=[2.7])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(given)
    if not len(arguments.slow) < arguments.gpus:
        parser.error(f"--slow must leave one of --gpus as it is, but has {len(arguments.slow)} factors")
    chosen = arguments.parts.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(temporary), arguments.gpus, arguments.slow)
        profiled = slowed(bench) if "slowed" in chosen else None
        if "splits" in chosen:
            splits(bench, profiled)
        if "equal" in chosen:
            equal(bench)
        if "cpu" in chosen:
            cpu(bench)
        if arguments.output is not None:
            arguments.output.write_text("\n".join(bench.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

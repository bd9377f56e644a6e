"""`strategy=ddp` beside a plain torch script that trains the same model, in turn, in one call.

    python scripts/bench_ddp.py --gpus 2 --out ddp.json
    python scripts/bench_ddp.py --device cpu --ranks 2 --tiny

The model is the shipped GPT with 124 million weights (model=gpt model.num_layers=12 model.num_heads=12
model.embedding_size=768 model.tie_weights=true data=synthetic data.kind=tokens data.vocab_size=50304
data.sequence_length=1024), the plain script is `scripts/models_bench/loops.py`. Speeds are medians of the log
lines after the first steps, memory is the peak of torch's allocator, `busy` is what NVIDIA's driver counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchlib.options import fill, parser_of
from benchlib.runs import keep
from ddp_bench import page
from ddp_bench.runs import Job, ours, plain
from ddp_bench.task import TASKS

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""By entrant and job, one a round."""


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    job = job_of(arguments, arguments.ranks, arguments.local_batch)
    found = in_turn({"both": job}, ["ours", "plain"], arguments.rounds)
    runs = {entrant: by_name["both"] for entrant, by_name in found.items()}
    results = {"facts": {**job.facts(), "words": job.words()}, "runs": runs}
    print(f"\n{page.ddp(results)}")
    keep(arguments.out, results)


def in_turn(jobs: dict[str, Job], entrants: list[str], rounds: int) -> Runs:
    """Run each job by each entrant, and all of them again: what else the machine does meets all."""
    runs: Runs = {entrant: {name: [] for name in jobs} for entrant in entrants}
    with tempfile.TemporaryDirectory(prefix="bench_ddp_") as temporary:
        for number in range(rounds):
            for entrant in entrants:
                for name, job in jobs.items():
                    began = time.perf_counter()
                    found = run_once(entrant, Path(temporary), job)
                    runs[entrant][name].append(found)
                    report(f"round {number + 1}, {entrant}, {name}", found, began)
    return runs


def run_once(name: str, folder: Path, job: Job) -> dict[str, Any]:
    """Run hetexp (`ours`) or the plain script (`plain`)."""
    if name == "plain":
        return plain(folder, job)
    return ours(folder, job.words(), job.warm_steps, job.task.tokens_per_sample)


def report(name: str, found: dict[str, Any], began: float) -> None:
    """Print a line about a run that is over."""
    print(
        f"{name}: {found['samples_per_s']:,.1f} samples/s, {found['step_s'] * 1e3:,.2f} ms a step "
        f"({time.perf_counter() - began:.0f} s)",
        flush=True,
    )


def job_of(arguments: argparse.Namespace, count: int, local_batch_size: int, model: str = "gpt") -> Job:
    """Return what so many devices train."""
    on_card = arguments.device == "cuda"
    return Job(
        task=TASKS[model][arguments.tiny],
        devices=tuple(f"cuda:{index}" for index in range(count)) if on_card else ("cpu",) * count,
        local_batch_size=local_batch_size,
        warm_steps=arguments.warm_steps,
        steps=arguments.steps,
        log_every=arguments.log_every,
        precision=arguments.precision,
        start_method="subprocess" if on_card else "forkserver",
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is trained and on what."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", "--ranks", dest="ranks", type=int, default=2, help="devices")
    parser.add_argument("--tiny", action="store_true", help="a model of no use: whether it works, no figures")
    parser.add_argument("--local-batch", type=int, help="samples of a step on each device; 32, tiny 4")
    parser.add_argument("--steps", type=int, help="that are measured; 100, tiny 4")
    parser.add_argument("--warm-steps", type=int, help="before them; 20, tiny 2")
    parser.add_argument("--log-every", type=int, help="steps; 10, tiny 2")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], help="bfloat16, on a CPU float32")
    parser.add_argument("--out", type=Path, help="where results are kept as JSON")


def complete(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Fill in what was left out, and refuse what does not fit together."""
    usual = {"local_batch": (32, 4), "steps": (100, 4), "warm_steps": (20, 2), "log_every": (10, 2)}
    fill(arguments, usual)
    if arguments.precision is None:  # not every processor computes in bfloat16
        arguments.precision = "float32" if arguments.device == "cpu" else "bfloat16"
    for name in (*usual, "ranks"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but is {getattr(arguments, name)}")
    for name in ("steps", "warm_steps"):
        if getattr(arguments, name) % arguments.log_every:
            parser.error(f"--{name.replace('_', '-')} must be a multiple of --log-every")


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    add_common(parser)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(given)
    complete(parser, arguments)
    return arguments


if __name__ == "__main__":
    main()

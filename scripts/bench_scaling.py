"""One device against several: throughput, efficiency, how busy the cards are, memory a card.

    python scripts/bench_scaling.py --gpus 2 --out scaling.json
    python scripts/bench_scaling.py --gpus 4 --counts 1,2,4 --models gpt,convnet --plain
    python scripts/bench_scaling.py --device cpu --ranks 2 --tiny

Weak scaling gives each device the same samples (the step's batch grows with the devices), strong scaling the
same batch to all of them together: one device's. `--models gpt,convnet`: the GPT of `bench_ddp.py`, and the
shipped conv net with 16 times the samples. One device runs `strategy=single`, several `strategy=ddp`.
`--plain` measures the plain script on the same devices as well.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_ddp import add_common, complete, job_of, run_once, tell
from ddp_bench import page
from ddp_bench.runs import Job
from ddp_bench.task import TASKS

IMAGES_A_SEQUENCE = 16
"""Samples of the conv net for one of the GPT: what a card computes at a time."""


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    results = {}
    for model in arguments.models:
        results[model] = bench(arguments, model)
        print(f"\n{model}: {page.scaling(results[model])}\n", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def bench(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run all in turn, again and again: what else the machine does meets all."""
    jobs = jobs_of(arguments, model)
    entrants = ["ours", "plain"] if arguments.plain else ["ours"]
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {one: {name: [] for name in jobs} for one in entrants}
    with tempfile.TemporaryDirectory(prefix="bench_scaling_") as temporary:
        for number in range(arguments.rounds):
            for entrant in entrants:
                for name, job in jobs.items():
                    began = time.perf_counter()
                    found = run_once(entrant, Path(temporary), job)
                    runs[entrant][name].append(found)
                    tell(f"{model}, round {number + 1}, {entrant}, {name}", found, began)
    one = jobs["1"]
    facts = {
        "parameters": one.task.num_parameters(),
        "sample": one.task.sample(),
        "precision": one.precision,
        "warm_steps": one.warm_steps,
        "steps": one.steps,
        "words": {name: job.words() for name, job in jobs.items()},
    }
    return {"facts": facts, "runs": runs}


def jobs_of(arguments: argparse.Namespace, model: str) -> dict[str, Job]:
    """Return what is run: one device, then each number of them with the same samples each, and in all."""
    batch = arguments.local_batch * (IMAGES_A_SEQUENCE if model == "convnet" and not arguments.tiny else 1)
    jobs = {"1": job_of(arguments, 1, batch, model)}
    for count in arguments.counts:
        if count > 1:
            jobs[f"{count}, weak"] = job_of(arguments, count, batch, model)
            jobs[f"{count}, strong"] = job_of(arguments, count, batch // count, model)
    return jobs


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_common(parser)
    parser.add_argument(
        "--counts", type=lambda text: [int(one) for one in text.split(",")], help="of devices"
    )
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=["gpt"], help=f"of {', '.join(TASKS)}"
    )
    parser.add_argument("--plain", action="store_true", help="the plain script, too")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args(given)
    complete(parser, arguments)
    arguments.counts = arguments.counts or [1, arguments.ranks]
    if unknown := sorted(set(arguments.models) - TASKS.keys()):
        parser.error(f"--models must be of {', '.join(TASKS)}, but has {', '.join(unknown)}")
    uneven = [count for count in arguments.counts if count < 1 or arguments.local_batch % count]
    if uneven:
        parser.error(f"--local-batch must be a multiple of each of --counts, but is not of {uneven}")
    return arguments


if __name__ == "__main__":
    main()

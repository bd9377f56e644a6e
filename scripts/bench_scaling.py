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
from typing import Any

from bench_ddp import add_common, complete, in_turn, job_of
from benchlib.options import names_of, numbers, parser_of
from benchlib.runs import keep
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
    keep(arguments.out, results)


def bench(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run one device and several, in turn."""
    jobs = jobs_of(arguments, model)
    print(f"{model}:", flush=True)
    runs = in_turn(jobs, ["ours", "plain"] if arguments.plain else ["ours"], arguments.rounds)
    facts = {**jobs["1"].facts(), "words": {name: job.words() for name, job in jobs.items()}}
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
    parser = parser_of(__doc__)
    add_common(parser)
    parser.add_argument("--counts", type=numbers, help="of devices")
    parser.add_argument("--models", type=names_of(TASKS), default=["gpt"], help=f"of {', '.join(TASKS)}")
    parser.add_argument("--plain", action="store_true", help="the plain script, too")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args(given)
    complete(parser, arguments)
    arguments.counts = arguments.counts or [1, arguments.ranks]
    uneven = [count for count in arguments.counts if count < 1 or arguments.local_batch % count]
    if uneven:
        parser.error(f"--local-batch must be a multiple of each of --counts, but is not of {uneven}")
    return arguments


if __name__ == "__main__":
    main()

"""Every strategy with every policy that makes a difference to it, side by side on emulated cards.

    python scripts/bench_strategies.py [--mixes "3:1,4 cards"] [--strategies ddp,pipeline]
        [--json results.json] [--write docs/reference/benchmarks.md]

All train the same model on the same samples of the same steps. Results are added to the JSON file as they
come; a later call with other mixes or strategies goes on with them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchlib.options import add_tables, names_of, parser_of
from benchlib.runs import keep
from benchlib.tables import publish
from strategy_bench import page
from strategy_bench.entrants import ENTRANTS, MIXES, entrants_of
from strategy_bench.measure import measure, prepare

QUICK_STEPS = 20


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    kept: dict[str, Any] = {"mixes": {}}
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="bench_strategies_") as folder:
        # A user's later runs must not find what is measured here.
        os.environ["HETEXP_HOME"] = str(Path(folder, "home"))
        for number, name in enumerate(arguments.mixes):
            bench(name, Path(folder, str(number)), arguments, kept)
    publish(page.render(kept), arguments.write)


def bench(name: str, folder: Path, arguments: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Run all entrants of a mix in turn, again and again: what else the machine does meets all of them."""
    before = kept["mixes"].get(name)
    scale = arguments.time_scale or (before["time_scale"] if before is not None else None)
    inputs = prepare(MIXES[name], folder, scale)
    rows = {(row["name"], row["policy"]): row for row in before["rows"]} if before is not None else {}
    wanted = [one for one in entrants_of(name) if one.strategy in arguments.strategies]
    rows |= {
        (one.name, one.policy): {"name": one.name, "strategy": one.strategy, "policy": one.policy, "runs": []}
        for one in wanted
    }
    for _ in range(arguments.repeats):
        for entrant in wanted:
            began = time.perf_counter()
            found = measure(inputs, entrant, arguments.steps)
            rows[entrant.name, entrant.policy]["runs"].append(found)
            print(
                f"{name}: {entrant.name} {entrant.policy or ''}: {found['samples_per_s']:,.1f} samples/s"
                f"{'' if found['valid'] else ', outrun'} ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
            order = [(one.name, one.policy) for one in entrants_of(name)]
            kept["mixes"][name] = {
                "title": inputs.mix.title,
                "global_batch_size": inputs.mix.global_batch_size,
                "steps": arguments.steps,
                "time_scale": inputs.time_scale,
                "rows": [rows[key] for key in order if key in rows and rows[key]["runs"]],
            }
            keep(arguments.json, kept)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    strategies = list(dict.fromkeys(one.strategy for one in ENTRANTS))
    parser.add_argument("--mixes", type=names_of(MIXES), default=list(MIXES))
    parser.add_argument("--strategies", type=names_of(strategies), default=strategies)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=1)
    add_tables(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.steps = QUICK_STEPS
    return arguments


if __name__ == "__main__":
    main()

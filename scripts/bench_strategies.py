"""Every strategy with every policy that makes a difference to it, side by side on emulated cards.

    python scripts/bench_strategies.py [--mixes "3:1,4 cards"] [--strategies ddp,pipeline]
        [--json results.json] [--write docs/benchmarks.md]

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

from balance_bench.page import write
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
        # What is measured here is not kept for a person's later runs.
        os.environ["HETEXP_HOME"] = str(Path(folder, "home"))
        for number, name in enumerate(arguments.mixes):
            bench(name, Path(folder, str(number)), arguments, kept)
    tables = page.render(kept)
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")
    if arguments.write is not None:
        write(arguments.write, tables)


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
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    strategies = list(dict.fromkeys(one.strategy for one in ENTRANTS))
    parser.add_argument("--mixes", type=lambda text: text.split(","), default=list(MIXES))
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=strategies)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps: whether it works, no figures")
    parser.add_argument("--time-scale", type=float, help="instead of the one that this machine can keep")
    parser.add_argument("--json", type=Path, help="where results are kept and added to")
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    arguments = parser.parse_args(given)
    for option, known in (("mixes", list(MIXES)), ("strategies", strategies)):
        wrong = [name for name in getattr(arguments, option) if name not in known]
        if wrong:
            parser.error(f"--{option} must be of {', '.join(known)}, but is {', '.join(wrong)} instead")
    if arguments.quick:
        arguments.steps = QUICK_STEPS
    return arguments


if __name__ == "__main__":
    main()

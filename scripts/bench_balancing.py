"""How near balancing comes to what a mix of cards allows, beside plain DDP and Accelerate. Emulated cards.

    python scripts/bench_balancing.py [--tables mixes,rivals,…] [--mixes 3:1,10:4:1] [--json results.json]
        [--write docs/reference/benchmarks.md]

Each table is a part of its own: results are added to the JSON file as they come, and a later call with other
tables goes on with them. Accelerate is the extra `bench` of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from balance_bench import page
from balance_bench.measure import (
    RIVALS,
    Stage,
    predict,
    prepare,
    run_policy,
    run_rival,
    run_solo,
    slow_down,
)
from balance_bench.mixes import MIXES
from benchlib.options import add_tables, names_of, parser_of
from benchlib.runs import keep
from benchlib.tables import publish

POLICIES = ("equal", "vram", "tflops", "profiled", "adaptive", "auto")
OURS = ("profiled", "adaptive", "auto")
"""Those that find out what the cards really do; `auto` is the default."""
SLOW_LINK, SLOWED = "20:1", "3:1"
PREDICTED = ("3:1", "10:4:1")
"""Mixes of the tables `prediction` and `regret`: half of the splits each."""
PREDICTION_STEPS = 6
"""Measured of each split: a mean of fewer says more of jitter than of the split."""
QUICK_MIXES = ("3:1", "165:61")


class Bench:
    """Measures the chosen tables and keeps the results.

    Args:
        arguments: of the command line.
        folder: for runs.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.results: dict[str, Any] = {}
        if arguments.json is not None and arguments.json.exists():
            self.results = json.loads(arguments.json.read_text(encoding="utf-8"))
        self._stages: dict[str, Stage] = {}

    def stage(self, name: str) -> Stage:
        """Return a mix made ready, the same for all tables of this call."""
        if name not in self._stages:
            given = (name, MIXES[name], self.folder / str(len(self._stages)), self.arguments.time_scale)
            self._stages[name] = self._timed(f"{name}: rehearsing", prepare, *given)
        return self._stages[name]

    def run(self) -> None:
        """Measure the chosen tables."""
        tables: dict[str, Callable[[], None]] = {
            "mixes": self.mixes,
            "rivals": self.rivals,
            "regret": self.prediction,
            "prediction": self.prediction,
            "slowdown": self.slowdown,
            "alone": self.alone,
        }
        chosen = self.arguments.tables
        for measured in dict.fromkeys(tables[name] for name in page.TABLES if name in chosen):
            measured()
        self.results["about"] = {
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "repeats": self.arguments.repeats,
        }
        keep(self.arguments.json, self.results)

    def mixes(self) -> None:
        """Every policy, and the other frameworks beside them if their table is wanted as well."""
        both = "rivals" in self.arguments.tables
        self._side_by_side("mixes", [*POLICIES, *(self._rivals() if both else ())])
        if both:
            self.results["rivals"] = self.results["mixes"]
            keep(self.arguments.json, self.results)

    def rivals(self) -> None:
        """Our measured policies and the other frameworks; already there if `mixes` was measured, too."""
        if "mixes" not in self.arguments.tables:
            self._side_by_side("rivals", [*OURS, *self._rivals()])

    def alone(self) -> None:
        """The slow link: all of it against the fast card by itself."""
        stage = self.stage(SLOW_LINK)
        runs: dict[str, list[Any]] = {"alone": [], **{name: [] for name in OURS}}
        for _ in range(self.arguments.repeats):
            runs["alone"].append(self._timed("alone", run_solo, stage))
            for name in OURS:
                runs[name].append(self._timed(name, run_policy, stage, name))
        self.results["alone"] = {"facts": stage.facts(), "runs": runs}
        keep(self.arguments.json, self.results)

    def prediction(self) -> None:
        """Both tables that come from one calibration: prediction and regret."""
        count = 4 if self.arguments.quick else 15
        found = {}
        for name in PREDICTED[:1] if self.arguments.quick else PREDICTED:
            stage = self.stage(name)
            found[stage.mix.title] = self._timed(
                f"{name}: predicting", predict, stage, count, PREDICTION_STEPS, self.arguments.repeats
            )
        self.results |= {"prediction": found, "regret": found}
        keep(self.arguments.json, self.results)

    def slowdown(self) -> None:
        """A device slowed at step 50 and restored at 100."""
        stage = self.stage(SLOWED)
        runs = self._timed("slow-down", slow_down, stage, self.arguments.repeats)
        self.results["slowdown"] = {stage.mix.title: runs}
        keep(self.arguments.json, self.results)

    def _side_by_side(self, table: str, entrants: list[str]) -> None:
        """Run all entrants in turn, again and again: what else the machine does meets all of them."""
        kept = self.results.setdefault(table, {})
        for name in self.arguments.mixes:
            stage = self.stage(name)
            runs: dict[str, list[Any]] = {entrant: [] for entrant in entrants}
            for _ in range(self.arguments.repeats):
                for entrant in entrants:
                    measure = run_rival if entrant in RIVALS else run_policy
                    runs[entrant].append(self._timed(f"{name}: {entrant}", measure, stage, entrant))
            kept[name] = {"facts": stage.facts(), "runs": runs}
            keep(self.arguments.json, self.results)

    def _rivals(self) -> list[str]:
        if find_spec("accelerate"):
            return list(RIVALS)
        print("Accelerate is not installed (pip install '.[bench]') and left out")
        return [name for name in RIVALS if name != "Accelerate"]

    def _timed(self, title: str, measure: Callable[..., Any], *given: Any) -> Any:
        """Call a function, and print a title and how long the call took."""
        began = time.perf_counter()
        found = measure(*given)
        if isinstance(found, dict) and "samples_per_s" in found:
            title += f": {found['samples_per_s']:,.1f} samples/s" + ("" if found["valid"] else ", outrun")
        print(f"{title} ({time.perf_counter() - began:.0f} s)", flush=True)
        return found


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--tables", type=names_of(page.TABLES), default=list(page.TABLES))
    parser.add_argument("--mixes", type=names_of(MIXES), default=list(MIXES))
    parser.add_argument("--repeats", type=int, default=3)
    add_tables(parser)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.repeats = 1
        arguments.mixes = [name for name in arguments.mixes if name in QUICK_MIXES]
    return arguments


def main() -> None:
    arguments = arguments_of()
    with tempfile.TemporaryDirectory(prefix="bench_balancing_") as folder:
        # A user's later runs must not find what is measured here.
        os.environ["HETEXP_HOME"] = str(Path(folder, "home"))
        bench = Bench(arguments, Path(folder))
        bench.run()
    publish(page.render(bench.results), arguments.write)


if __name__ == "__main__":
    main()

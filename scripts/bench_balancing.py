"""How near balancing comes to what a mix of cards allows, beside plain DDP and Accelerate. Emulated cards.

    python scripts/bench_balancing.py [--tables mixes,rivals,…] [--mixes 3:1,10:4:1] [--json results.json]
        [--write docs/benchmarks.md]

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
from balance_bench.regret import regrets

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
            told = f"{name}: rehearsing"
            folder = self.folder / str(len(self._stages))
            self._stages[name] = self._timed(
                told, prepare, name, MIXES[name], folder, self.arguments.time_scale
            )
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
        self.keep()

    def mixes(self) -> None:
        """Every policy, and the other frameworks beside them if their table is wanted as well."""
        both = "rivals" in self.arguments.tables
        self._side_by_side("mixes", [*POLICIES, *(self._rivals() if both else ())])
        if both:
            self.results["rivals"] = self.results["mixes"]
            self.keep()

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
        self.keep()

    def prediction(self) -> None:
        """Both tables that come from one calibration: prediction and regret."""
        count = 4 if self.arguments.quick else 15
        found = {}
        for name in PREDICTED[:1] if self.arguments.quick else PREDICTED:
            stage = self.stage(name)
            found[stage.mix.title] = self._timed(
                f"{name}: predicting", predict, stage, count, PREDICTION_STEPS, self.arguments.repeats
            )
        counts = {2: 20} if self.arguments.quick else {2: 500, 3: 200, 8: 100}
        model = [
            self._timed(f"regret in the model, {n} cards", regrets, n, many) for n, many in counts.items()
        ]
        self.results |= {"prediction": found, "regret": {"model": model, "mixes": found}}
        self.keep()

    def slowdown(self) -> None:
        """A device slowed at step 50 and restored at 100."""
        stage = self.stage(SLOWED)
        runs = self._timed("slow-down", slow_down, stage, self.arguments.repeats)
        self.results["slowdown"] = {stage.mix.title: runs}
        self.keep()

    def keep(self) -> None:
        """Write down what there is."""
        if self.arguments.json is not None:
            self.arguments.json.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

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
            self.keep()

    def _rivals(self) -> list[str]:
        missing = [] if find_spec("accelerate") else ["Accelerate"]
        if missing:
            print("Accelerate is not installed (pip install '.[bench]') and left out")
        return [name for name in RIVALS if name not in missing]

    def _timed(self, told: str, measure: Callable[..., Any], *given: Any) -> Any:
        """Call a function, and print what it was about and how long it took."""
        began = time.perf_counter()
        found = measure(*given)
        if isinstance(found, dict) and "samples_per_s" in found:
            told += f": {found['samples_per_s']:,.1f} samples/s" + ("" if found["valid"] else ", outrun")
        print(f"{told} ({time.perf_counter() - began:.0f} s)", flush=True)
        return found


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=_list_of(page.TABLES), default=list(page.TABLES))
    parser.add_argument("--mixes", type=_list_of(MIXES), default=list(MIXES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one run on two mixes: whether it works, no figures"
    )
    parser.add_argument("--time-scale", type=float, help="instead of the one that this machine can keep")
    parser.add_argument("--json", type=Path, help="where results are kept and added to")
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.repeats = 1
        arguments.mixes = [name for name in arguments.mixes if name in QUICK_MIXES]
    return arguments


def _list_of(known: Any) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = text.split(",")
        wrong = [name for name in names if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(
                f"must be of {', '.join(known)}, but is {', '.join(wrong)} instead"
            )
        return names

    return read


def main() -> None:
    arguments = arguments_of()
    with tempfile.TemporaryDirectory(prefix="bench_balancing_") as folder:
        os.environ["HETEXP_HOME"] = str(
            Path(folder, "home")
        )  # what is measured here is not kept for later runs
        bench = Bench(arguments, Path(folder))
        bench.run()
    tables = page.render(bench.results)
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")
    if arguments.write is not None:
        page.write(arguments.write, tables)


if __name__ == "__main__":
    main()

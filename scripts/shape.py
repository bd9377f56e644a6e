"""Measure what makes the package hard to read, and check that it gets no worse.

    python scripts/shape.py [--json] [--check]

- **Reading path**: the files of hetexp on the call stack at `optimizer.step()`, from the worker's entry on.
- **Files entered**: all files of hetexp whose code runs in one step of `ddp`, from one update to the next, in
  a rank's main thread.
- **Circles**: groups of modules that import each other when they are imported, and those that need imports
  inside functions or for type checkers to close.
- **Flat files**: `.py` files directly in one folder.
- **Lines** of files and of functions, from `def` to the last line.

The first two come from a real run of two CPU ranks, so that no name inside the package matters. `--check`
ends with 1 if a figure is above its limit.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hetexp"
FLAT_FILES, FUNCTION_LINES, FILE_LINES = 20, 60, 400
"""From here on a folder, a function or a file counts as large."""
LIMITS: dict[str, tuple[int, int | None]] = {
    "files of the reading path": (4, 6),
    "files entered in a step": (31, None),
    "circles at import": (0, 0),
    "circles with imports in functions": (0, 0),
    "circles with imports for type checkers": (0, 0),
    f"folders with more than {FLAT_FILES} flat files": (0, 0),
    f"functions over {FUNCTION_LINES} lines": (4, None),
    f"files over {FILE_LINES} lines": (9, None),
    "most flat files in a folder": (20, FLAT_FILES),
    "lines of the longest function": (86, None),
    "lines of the longest file": (617, None),
    "lines in all": (77_070, 61_000),
}
"""The most that `--check` lets pass, and what the package is to reach.

A limit is the figure of today. It falls; it rose with the samples, losses, optimizers and models that people
bring, and with the checks, words and measurements of the start. That of all lines leaves room for mended
faults.
"""
PROBE = "HETEXP_SHAPE_PROBE"
"""Variable with the folder that ranks write what they saw to."""
PROBED_STEP = 3
RUN = [
    *("strategy=ddp", "balancing=equal", "hardware.devices=[cpu,cpu]", "hardware.threads_per_rank=1"),
    "launch.start_method=subprocess",  # of which the stack has the worker alone
    *("optimizer=sgd", "optimizer._target_=shape.probing_sgd", "model=mlp", "data=synthetic"),
    *("trainer.global_batch_size=8", "trainer.max_steps=4", "trainer.max_epochs=null"),
    *("trainer.log_every=100", "fault.survive=false", "logger=none", "monitor=none", "diagram=false"),
]


def probing_sgd(params: Any, **options: Any) -> Any:
    """Return an SGD that writes down, at one update, who calls it and which files ran since the one before.

    A rank builds it in place of its optimizer.
    """
    import torch

    class ProbingSGD(torch.optim.SGD):
        """Counts its steps."""

        count = 0

        def step(self, closure: Any = None) -> Any:
            sys.setprofile(None)
            self.count += 1
            if self.count == PROBED_STEP:
                seen = {"stack": stack_files(sys._getframe(1)), "entered": sorted(entered)}
                Path(os.environ[PROBE], f"{os.getpid()}.json").write_text(json.dumps(seen), encoding="utf-8")
            result = super().step(closure)
            if self.count == PROBED_STEP - 1:
                sys.setprofile(note)
            return result

    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.update(package_files([frame.f_code.co_filename]))

    return ProbingSGD(params, **options)


def stack_files(frame: FrameType | None, package: Path = PACKAGE) -> list[str]:
    """Return the package's files from the outermost call to this frame, each once."""
    calls = []
    while frame is not None:
        calls.append(frame.f_code.co_filename)
        frame = frame.f_back
    return list(dict.fromkeys(package_files(reversed(calls), package)))


def package_files(files: Iterable[str], package: Path = PACKAGE) -> list[str]:
    """Return those files that lie in the package, relative to it."""
    paths = [Path(file) for file in files if file.startswith(f"{package}{os.sep}")]
    return [path.relative_to(package).as_posix() for path in paths]


def ddp_step() -> dict[str, list[str]]:
    """Run two ranks, and return the files on the stack at an update and those entered since the one before.

    Raises:
        RuntimeError: the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="shape_") as folder:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
        variables = {"PYTHONPATH": path, "HETEXP_HOME": folder, PROBE: folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "train.py", *RUN, f"hydra.run.dir={folder}/run"]
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, encoding="utf-8"
        )
        seen = [json.loads(file.read_text(encoding="utf-8")) for file in Path(folder).glob("*.json")]
    if run.returncode != 0 or len(seen) != 2:
        raise RuntimeError(f"The run of two ranks failed ({run.returncode}):\n{run.stdout}{run.stderr}")
    return {
        "stack": max((rank["stack"] for rank in seen), key=len),
        "entered": sorted({file for rank in seen for file in rank["entered"]}),
    }


@dataclass
class Imports:
    """Modules that a module imports, by where it says so."""

    at_import: set[str]
    in_functions: set[str]
    for_types: set[str]


def module_names(package: Path) -> dict[str, Path]:
    """Return the files of a package by the names that they are imported by."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(name: str, path: Path, known: Mapping[str, Path]) -> Imports:
    """Return which modules of the same package a module imports."""
    imports = Imports(set(), set(), set())
    base = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def visit(node: ast.AST, place: set[str]) -> None:
        if isinstance(node, ast.Import):
            place.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            start = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                place.update([inner] if inner in known else [module] if module in known else [])
        elif (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            and place is imports.at_import
        ):
            place = imports.in_functions
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                visit(statement, imports.for_types)
            for statement in node.orelse:
                visit(statement, place)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, place)

    visit(ast.parse(path.read_text(encoding="utf-8")), imports.at_import)
    return imports


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that all reach each other, the largest first (Tarjan 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    groups = []

    def walk(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        waiting.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in numbers:
                walk(other)
            if other in waiting:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == numbers[name]:
            place = waiting.index(name)
            groups.append(sorted(waiting[place:]))
            del waiting[place:]

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 4 * len(graph) + 1000))
    for name in graph:
        if name not in numbers:
            walk(name)
    return sorted((group for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def flat_files(package: Path) -> dict[str, int]:
    """Return the number of `.py` files directly in each folder, the largest first."""
    counts: dict[str, int] = {}
    for path in package.rglob("*.py"):
        folder = path.parent.relative_to(package.parent).as_posix()
        counts[folder] = counts.get(folder, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def file_lines(package: Path) -> dict[str, int]:
    """Return the lines of each file, the longest first."""
    paths = {path.relative_to(package.parent).as_posix(): path for path in package.rglob("*.py")}
    lines = {name: path.read_bytes().count(b"\n") for name, path in paths.items()}
    return dict(sorted(lines.items(), key=lambda item: (-item[1], item[0])))


def function_lines(package: Path) -> dict[str, int]:
    """Return the lines of each function and method from its `def`, the longest first."""
    lines = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path.relative_to(package.parent).as_posix()}:{node.lineno} {node.name}"
                lines[place] = (node.end_lineno or node.lineno) - node.lineno + 1
    return dict(sorted(lines.items(), key=lambda item: (-item[1], item[0])))


def measure(package: Path, step: Mapping[str, list[str]]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return the figures by name, and what stands behind those that have a limit.

    Args:
        step: what `ddp_step` returns.
    """
    known = module_names(package)
    imports = {name: imports_of(name, path, known) for name, path in known.items()}
    at_import = {name: i.at_import - {name} for name, i in imports.items()}
    running = {name: (i.at_import | i.in_functions) - {name} for name, i in imports.items()}
    written = {name: running[name] | i.for_types - {name} for name, i in imports.items()}
    files, functions, flat = file_lines(package), function_lines(package), flat_files(package)
    lists = {
        "files of the reading path": step["stack"],
        "files entered in a step": step["entered"],
        "circles at import": list(map(" ↔ ".join, circles(at_import))),
        "circles with imports in functions": list(map(" ↔ ".join, circles(running))),
        "circles with imports for type checkers": list(map(" ↔ ".join, circles(written))),
        f"folders with more than {FLAT_FILES} flat files": _above(flat, FLAT_FILES),
        f"functions over {FUNCTION_LINES} lines": _above(functions, FUNCTION_LINES),
        f"files over {FILE_LINES} lines": _above(files, FILE_LINES),
    }
    figures = {name: len(listed) for name, listed in lists.items()} | {
        "most flat files in a folder": max(flat.values()),
        "lines of the longest function": max(functions.values()),
        "lines of the longest file": max(files.values()),
        "median lines of a function": round(statistics.median(functions.values())),
        "median lines of a file": round(statistics.median(files.values())),
        "lines in all": sum(files.values()),
    }
    return figures, lists


def _above(counts: Mapping[str, int], limit: int) -> list[str]:
    return [f"{name}: {count}" for name, count in counts.items() if count > limit]


def above(figures: Mapping[str, int], limits: Mapping[str, tuple[int, int | None]]) -> list[str]:
    """Return the names of the figures above their limits."""
    return [name for name, (limit, _) in limits.items() if figures[name] > limit]


def main(given: list[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures and what is behind them as JSON")
    parser.add_argument("--check", action="store_true", help="end with 1 if a figure is above its limit")
    options = parser.parse_args(given)
    figures, lists = measure(PACKAGE, ddp_step())
    if options.json:
        print(json.dumps({"figures": figures, "lists": lists}, indent=2, ensure_ascii=False))
    else:
        print("| figure | now | limit | target |\n|---|---|---|---|")
        for name, value in figures.items():
            limit, target = LIMITS.get(name, (None, None))
            print(f"| {name} | {value:,} | {_cell(limit)} | {_cell(target)} |")
    failed = above(figures, LIMITS) if options.check else []
    for name in failed:
        limit = LIMITS[name][0]
        print(
            f"The number of {name} must be at most {limit:,}, but is {figures[name]:,} instead.",
            file=sys.stderr,
        )
        for line in lists.get(name, []):
            print(f"  {line}", file=sys.stderr)
    return 1 if failed else 0


def _cell(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


if __name__ == "__main__":
    sys.exit(main())

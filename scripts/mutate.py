"""Change the package in one place at a time, and see whether the tests notice.

    python scripts/mutate.py [--only WORD …] [--list] [--jobs N] [--json]

`scripts/mutations/*.yaml` lists the changes (mutations): a title, the file in `hetexp`, the exact old text,
which stands there once, the new text, and the tests that run (files or node ids in `tests`). Each mutation is
made in a copy of the tree. Its tests run there in a child that is forked from a process that has imported
torch.

A mutation is `caught` if a test fails or does not end, `survived` if all pass, and an `error` if the tests
cannot be collected. Each test that failed runs once more at the end without a mutation: what it caught is an
`error` if it fails then, too. The exit code is 2 after an error, and 1 if a mutation survived.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
LISTS = Path(__file__).resolve().parent / "mutations"
COPIED = ("hetexp", "hydra_plugins", "conf", "scripts", "benchmarks", "tests", "examples", "docs")
FILES = ("train.py", "pyproject.toml", "README.md", "CHANGELOG.md", "mkdocs.yml")
PRELOADED = (
    *(
        "torch",
        "torch.distributed",
        "torch.utils.flop_counter",
        "numpy",
        "scipy.stats",
        "sklearn.linear_model",
    ),
    *(
        "pytest",
        "hypothesis",
        "xdist.scheduler",
        "psutil",
        "httpx",
        "hydra",
        "omegaconf",
        "pydantic",
        "rich.console",
    ),
    *("filelock", "safetensors.torch", "sqlalchemy", "fastapi", "starlette.testclient", "wandb", "jinja2"),
)
"""Modules that the process has before it forks; each child imports its own copy of hetexp."""
SECONDS = 300.0
"""Longest time of a mutation's tests; a mutation may let them wait for ever."""
PASSED, HANGS = 0, -1000
"""Exit codes of pytest, and ours of tests that did not end."""
SIGN = "mutate: "
BEGINS, FAILS = f"{SIGN}begins ", f"{SIGN}fails "


@dataclass(frozen=True)
class Mutation:
    """A change of one place."""

    title: str
    file: str
    """Path in `hetexp`."""
    old: str
    """Text that stands in the file once."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids in `tests`, in the order in which they run, until one fails."""
    group: str
    """Name of the list."""

    def applied(self, root: Path = ROOT) -> str:
        """Return the file's text with the change.

        Raises:
            ValueError: the old text does not stand there once, or a test does not exist.
        """
        path = root / "hetexp" / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1 or self.new == self.old:
            times = text.count(self.old)
            raise ValueError(
                f"{self.title!r}: the old text must stand once in {self.file}, not {times} times"
            )
        for test in self.tests:
            if not (root / "tests" / test.partition("::")[0]).is_file():
                raise ValueError(f"{self.title!r}: there is no tests/{test}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What the tests said of a mutation."""

    mutation: Mutation
    verdict: str
    """`caught`, `survived` or `error`."""
    by: str
    """The test that failed; why it is an error."""
    seconds: float


def read_mutations(folder: Path = LISTS) -> list[Mutation]:
    """Return all mutations of the lists."""
    return [
        Mutation(**{**entry, "tests": tuple(entry["tests"].split())}, group=path.stem)
        for path in sorted(folder.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]


def chosen(mutations: Iterable[Mutation], words: Sequence[str]) -> list[Mutation]:
    """Return the mutations whose list, title or file has one of the words; without words all."""
    return [
        m for m in mutations if not words or any(word in f"{m.group} {m.title} {m.file}" for word in words)
    ]


# ---------------------------------------------------------------- processes


def copy_tree(folder: Path) -> Path:
    """Return a copy of what tests need, compiled: Python checks sources by hash then, not by time."""
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "node_modules")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compiled, "hetexp", "hydra_plugins"], cwd=folder, check=True)
    return folder


class Child:
    """A forked process that runs tests in a copy of the tree.

    Args:
        mutation: what is changed in the copy until `end`, and tests run until one fails; `None`: nothing.
    """

    def __init__(self, tree: Path, tests: Sequence[str], mutation: Mutation | None) -> None:
        self.tree, self.mutation = tree, mutation
        self._started, self._output = time.monotonic(), tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        if mutation is not None:
            path = tree / "hetexp" / mutation.file
            self._before = path.read_bytes()
            path.write_text(mutation.applied(tree), encoding="utf-8")
        self._id = os.fork()
        if self._id == 0:
            _be_pytest(tree, [*(["-x"] if mutation is not None else []), *tests], self._output.fileno())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """Return pytest's exit code, `HANGS` after `SECONDS`; `None` while the tests run."""
        done, status = os.waitpid(self._id, os.WNOHANG)
        if not done and self.seconds < SECONDS:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what the tests have started, too
            os.killpg(self._id, signal.SIGKILL)
        if not done:
            os.waitpid(self._id, 0)
        return os.waitstatus_to_exitcode(status) if done else HANGS

    def end(self) -> tuple[list[str], str]:
        """Undo the mutation; return the tests that failed, else the last one, and pytest's last line."""
        if self.mutation is not None:
            (self.tree / "hetexp" / self.mutation.file).write_bytes(self._before)
        # An example that fails because of one mutation would be tried with all others.
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        with self._output as output:
            output.seek(0)
            lines = [line for line in output.read().decode(errors="replace").splitlines() if line]
        failed = [line.removeprefix(FAILS) for line in lines if line.startswith(FAILS)]
        begun = [line.removeprefix(BEGINS) for line in lines if line.startswith(BEGINS)]
        return failed or begun[-1:], next((line for line in reversed(lines) if SIGN not in line), "no output")


class _Signs:
    """A plugin of pytest that prints the ids of tests that begin, and of those that fail."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(f"\n{BEGINS}{nodeid}", flush=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(f"\n{FAILS}{report.nodeid}", flush=True)


def _be_pytest(tree: Path, arguments: Sequence[str], output: int) -> None:
    """Become the process of some tests; never returns."""
    code = 70
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        paths = [str(tree), str(tree / "scripts")]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        import pytest

        usual = ["-q", "--no-header", "--no-summary", "-s", "--timeout=60", "--timeout-method=thread"]
        usual += ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
        words = [word if word.startswith("-") else f"tests/{word}" for word in arguments]
        code = int(pytest.main([*usual, *words], plugins=[_Signs()]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def run_children(
    trees: Sequence[Path], pairs: Iterable[tuple[Sequence[str], Mutation | None]]
) -> Iterator[tuple[Child, int]]:
    """Yield each child that has ended, with its exit code; one runs in each copy at a time."""
    waiting, free, running = iter(pairs), list(trees), list[Child]()
    while True:
        while free and (pair := next(waiting, None)) is not None:
            running.append(Child(free.pop(), *pair))
        if not running:
            return
        time.sleep(0.05)
        for child in list(running):
            if (code := child.poll()) is not None:
                running.remove(child)
                yield child, code
                free.append(child.tree)


def try_all(mutations: Sequence[Mutation], jobs: int) -> Iterator[Result]:
    """Yield what the tests say of each mutation; again if a test that caught it fails without it, too.

    Raises:
        ValueError: a mutation cannot be made.
    """
    for mutation in mutations:
        mutation.applied()
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutate_") as folder:
        trees = [copy_tree(Path(folder, f"tree_{number}")) for number in range(jobs)]
        by_test: dict[str, list[Result]] = {}
        for child, code in run_children(
            trees, ((m.tests, m) for m in sorted(mutations, key=lambda m: m.tests))
        ):
            assert child.mutation is not None
            failed, line = child.end()
            verdict = "survived" if code == PASSED else "caught" if failed else "error"
            by = {"survived": "", "caught": "".join(failed[:1])}.get(verdict, line)
            result = Result(child.mutation, verdict, by, child.seconds)
            if verdict == "caught":
                by_test.setdefault(by.removeprefix("tests/"), []).append(result)
            yield result
        files: dict[str, list[str]] = {}
        for test in by_test:
            files.setdefault(test.partition("::")[0], []).append(test)
        for child, code in run_children(trees, ((tests, None) for tests in files.values())):
            for test in child.end()[0] if code != PASSED else ():
                for result in by_test.get(test.removeprefix("tests/"), ()):
                    why = f"{test} fails without the mutation, too"
                    yield dataclasses.replace(result, verdict="error", by=why)


def main(given: list[str] | None = None) -> int:
    """Try the mutations, print what the tests say, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="of these in list, title or file"
    )
    parser.add_argument("--list", action="store_true", help="print the mutations, and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, one a line")
    options = parser.parse_args(given)
    mutations = chosen(read_mutations(), options.only)
    if options.list:
        for mutation in mutations:
            print(f"{mutation.group}: {mutation.title} (hetexp/{mutation.file}; {' '.join(mutation.tests)})")
        return 0

    results = {}
    for result in try_all(mutations, options.jobs):
        results[result.mutation] = result
        if options.json:
            print(json.dumps(dataclasses.asdict(result), ensure_ascii=False), flush=True)
        else:
            by = f": {result.by}" if result.by else ""
            print(f"{result.verdict:9}{result.seconds:6.1f} s  {result.mutation.title}{by}", flush=True)
    counts = Counter(result.verdict for result in results.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())), file=sys.stderr)
    return 2 if counts["error"] else 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare two checkouts bit by bit: the losses of every step, and the parameters at the end.

    python scripts/loss_compare.py --before REF --after REF [--keep FOLDER] [--cards]

REF is a commit, a branch or a tag, or a folder with train.py (`.`), which is taken as it is. Both checkouts
train the same runs in float64 on CPU ranks of one thread each. `--cards` adds `dp`, on an NVIDIA card. The
script reads only public files, so that the code that writes them may change. It ends with 1 if a run differs
or fails. After a change that keeps the numbers, every run is equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

STEPS = 10
SYNC = "strategy.sync_every=4"  # the last step is no multiple of it
COMMON = [
    *("model=gpt", "model.num_layers=5", "model.num_heads=2", "model.embedding_size=16"),
    *("model.tie_weights=true", "model.num_experts=2", "model.balance_weight=0.1"),
    *("data=synthetic", "data.kind=tokens", "data.mask_fraction=0.6"),
    *("data.num_samples=150", "data.num_test_samples=20"),  # the last batch of an epoch is short
    *("trainer.global_batch_size=32", f"trainer.max_steps={STEPS}", "trainer.max_epochs=null"),
    *("trainer.precision=float64", "trainer.log_every=1"),
    *("hardware.threads_per_rank=1", "launch.start_method=forkserver", "fault.survive=false"),
    *("logger=none", "monitor=none", "diagram=false"),
]
RUN_SECONDS = 300
"""Longest that a run may take."""


def split(*counts: int) -> list[str]:
    """Return the words for CPU ranks that take this many samples of each batch."""
    return [*ranks(len(counts)), "balancing=manual", f"balancing.weights={list(counts)}".replace(" ", "")]


def ranks(count: int) -> list[str]:
    """Return the words for CPU ranks with equal shares."""
    return [f"hardware.devices=[{','.join(['cpu'] * count)}]", "balancing=equal"]


SGD = ["optimizer=sgd", "optimizer.momentum=0.9"]
ADAM = ["optimizer=adamw", "trainer.clip_norm=0.5"]
"""A factor on the gradient changes only the last bits here, and everything under SGD."""
TWICE = ["hardware.gpu_ids=[0,0]", "hardware.share_devices=true", "balancing=manual"]
OUTER = ["strategy.inner_state=average", "strategy.outer_lr=0.7", "strategy.outer_momentum=0.9"]
CONFIGURATIONS: dict[tuple[str, str], list[str]] = {
    ("single", "whole batch"): [*ranks(1), *SGD],
    ("single", "microbatches of 8"): [*ranks(1), *ADAM, "trainer.microbatch_size=8"],
    ("ddp", "24/8"): [*split(24, 8), *SGD],
    ("ddp", "20/9/3 in 2 microbatches"): [*split(20, 9, 3), *ADAM, "trainer.accumulate=2"],
    ("local_sgd", "24/8"): [*split(24, 8), *SGD, SYNC],
    ("local_sgd", "20/9/3 with momentum"): [*split(20, 9, 3), *ADAM, SYNC, *OUTER],
    ("hierarchical_sgd", "12+8 and 9+3"): [
        *(*split(12, 8, 9, 3), *SGD, SYNC, "strategy.groups=[[0,1],[2,3]]")
    ],
    ("hierarchical_sgd", "20 and 9+3"): [*split(20, 9, 3), *ADAM, SYNC, "strategy.groups=[[0],[1,2]]"],
    ("independent", "24/8"): [*split(24, 8), *SGD],
    ("independent", "20/9/3"): [*split(20, 9, 3), *ADAM],
    ("pipeline", "2+3 layers"): [*ranks(2), *SGD, "strategy.shard_plan=[[0,2],[2,5]]"],
    ("pipeline", "1+1+3 layers by GPipe"): [
        *(*ranks(3), *ADAM, "strategy.shard_plan=[[0,1],[1,2],[2,5]]", "strategy.schedule=GPipe")
    ],
    ("hybrid", "4+1 layers and 5"): [
        *(*ranks(3), *SGD, "strategy.groups=[[0,1],[2]]", "strategy.shard_plan=[[[0,4],[4,5]],[[0,5]]]")
    ],
    ("hybrid", "3+2 layers and 1+4"): [
        *(*split(3, 1, 3, 1), *ADAM, "strategy.groups=[[0,2],[1,3]]"),
        "strategy.shard_plan=[[[0,3],[3,5]],[[0,1],[1,5]]]",
    ],
    ("dp", "20/12"): [*TWICE, *SGD, "balancing.weights=[20,12]"],
    ("dp", "3:1 in 3 microbatches"): [*TWICE, *ADAM, "balancing.weights=[3,1]", "trainer.accumulate=3"],
}


class RunError(Exception):
    """A run that did not end well, or did not write what is compared."""


@dataclass
class Result:
    """What a run left behind: losses by step and name, tensors by the checkpoint's folder and name."""

    losses: dict[tuple[int, str], float]
    parameters: dict[str, np.ndarray]


@contextlib.contextmanager
def checkout(ref: str, folder: Path) -> Iterator[Path]:
    """Give the folder of a checkout; the worktree of a commit goes again.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    if Path(ref, "train.py").is_file():
        yield Path(ref).resolve()
        return
    git = ["git", "-C", str(Path(__file__).parent), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), ref], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def environment(tree: Path, home: Path) -> dict[str, str]:
    """Return the variables under which processes import hetexp from this tree."""
    return os.environ | {"PYTHONPATH": str(tree), "HETEXP_HOME": str(home), "OMP_NUM_THREADS": "1"}


def is_imported_from(tree: Path, home: Path) -> bool:
    """Return whether processes in this tree import its hetexp, and not one that is installed."""
    command = [sys.executable, "-c", "import hetexp; print(hetexp.__file__)"]
    path = subprocess.check_output(command, cwd=tree, env=environment(tree, home), text=True)
    return Path(path.strip()).resolve().is_relative_to(tree.resolve())


def train(tree: Path, words: list[str], folder: Path, home: Path) -> Result:
    """Train in a tree by its own train.py, and return what the run left in its folder."""
    folder.mkdir(parents=True)
    command = [sys.executable, "train.py", *COMMON, *words, f"hydra.run.dir={folder}"]
    log = folder / "output.log"
    with log.open("wb") as output:
        run = subprocess.Popen(command, cwd=tree, env=environment(tree, home), stdout=output, stderr=output)
        try:
            code = run.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired as error:
            run.kill()  # its ranks end with it
            raise RunError(f"it took more than {RUN_SECONDS} seconds") from error
    if code != 0:
        raise RunError(f"exit code {code}: {' '.join(log.read_text(encoding='utf-8').split()[-60:])}")
    return read_run(folder)


def read_run(folder: Path, steps: int = STEPS) -> Result:
    """Read a run folder; a missing file or loss is a `RunError`."""
    try:
        status = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["status"]
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{type(error).__name__}: {error}") from error
    if status != "completed":
        raise RunError(f"its status is {status!r}")
    losses: dict[tuple[int, str], float] = {}
    for row in map(json.loads, lines):
        losses |= {(row["step"], name): row[name] for name in ("train/loss", "eval/loss") if name in row}
    missing = [step for step in range(1, steps + 1) if (step, "train/loss") not in losses]
    if missing:
        raise RunError(f"metrics.jsonl has no train/loss of steps {missing}")
    parameters: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("checkpoints/**/model.safetensors")):
        place = path.parent.relative_to(folder / "checkpoints")
        parameters |= {f"{place}/{name}": tensor for name, tensor in load_file(path).items()}
    if not parameters:
        raise RunError("it has no model.safetensors")
    return Result(losses, parameters)


def different_losses(before: Result, after: Result) -> list[str]:
    """Return a sentence for each loss whose bits differ, or that only one run has."""
    both = {key: (before.losses.get(key), after.losses.get(key)) for key in before.losses | after.losses}
    # The shortest decimal that gives the same double: equal text is equal bits, and nan equals nan.
    different = [key for key, (old, new) in sorted(both.items()) if repr(old) != repr(new)]
    return [f"{key[1]} of step {key[0]}: {both[key][0]!r} → {both[key][1]!r}" for key in different]


def different_parameters(before: Result, after: Result) -> list[str]:
    """Return a sentence for each tensor whose type, shape or bits differ, or that only one run has."""
    differences = []
    for name in sorted(before.parameters.keys() | after.parameters.keys()):
        old, new = before.parameters.get(name), after.parameters.get(name)
        if old is None or new is None:
            differences.append(f"{name} is only in the run {'before' if new is None else 'after'}")
        elif (old.dtype, old.shape) != (new.dtype, new.shape):
            differences.append(f"{name}: {old.dtype}{list(old.shape)} → {new.dtype}{list(new.shape)}")
        elif old.tobytes() != new.tobytes():
            differences.append(f"{name}: largest difference {np.abs(old - new).max():.3g}")
    return differences


def row(name: str, before: Result | RunError, after: Result | RunError) -> tuple[str, bool]:
    """Return the table's row for a configuration, and whether both runs are equal."""
    if isinstance(before, RunError) or isinstance(after, RunError):
        sides = {"before": before, "after": after}
        failures = [f"{side}: {error}" for side, error in sides.items() if isinstance(error, RunError)]
        return f"| {name} | {'; '.join(failures)} | FAILED |", False
    losses, tensors = different_losses(before, after), different_parameters(before, after)
    cells = [f"{len(before.losses)} losses, {len(before.parameters)} tensors"]
    for kind, different in (("losses", losses), ("tensors", tensors)):
        cells += [f"{kind} that differ: {len(different)}, first {different[0]}"] if different else []
    return f"| {name} | {'; '.join(cells)} | {'DIFFERENT' if len(cells) > 1 else 'equal'} |", len(cells) == 1


def main(given: list[str] | None = None) -> int:
    """Train everything in both checkouts, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", required=True, metavar="REF")
    parser.add_argument("--after", required=True, metavar="REF")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder that keeps all runs")
    parser.add_argument("--cards", action="store_true", help="compare dp as well, on an NVIDIA card")
    options = parser.parse_args(given)
    sides = {"before": options.before, "after": options.after}
    with tempfile.TemporaryDirectory(prefix="loss_compare_") as scratch, contextlib.ExitStack() as stack:
        home, runs = Path(scratch, "home"), Path(options.keep or Path(scratch, "runs")).resolve()
        if options.keep and runs.exists():
            parser.error(f"--keep must be a new folder, but is {str(runs)!r} instead.")
        try:
            trees = {s: stack.enter_context(checkout(ref, Path(scratch, s))) for s, ref in sides.items()}
        except subprocess.CalledProcessError:
            parser.error(f"--before and --after must be commits or folders with train.py, but are {sides}.")
        for side, tree in trees.items():
            if not is_imported_from(tree, home):
                parser.error(f"Python imports another hetexp than that of --{side}, {tree}.")

        def attempt(key: tuple[str, str], side: str) -> Result | RunError:
            strategy, words = key[0], CONFIGURATIONS[key]
            folder = runs / re.sub(r"\W+", "_", " ".join(key)) / side
            try:
                return train(trees[side], [f"strategy={strategy}", *words], folder, home)
            except RunError as error:
                return error

        all_equal = True
        print("| configuration | compared | result |\n|---|---|---|")
        keys = [key for key in CONFIGURATIONS if key[0] != "dp" or options.cards]
        with ThreadPoolExecutor(max_workers=2) as pool:
            for key, pair in [(key, [pool.submit(attempt, key, side) for side in sides]) for key in keys]:
                line, equal = row(" ".join(key), pair[0].result(), pair[1].result())
                print(line, flush=True)
                all_equal &= equal
    print("All runs are equal to the bit." if all_equal else "Not all runs are equal.")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())

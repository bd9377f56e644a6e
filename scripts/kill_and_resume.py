"""Runs that go on by `resume=auto` after everything is killed at random instants.

    python scripts/kill_and_resume.py --kills 200 --seed 0 [--mixed]

A small run with dropout is killed (SIGKILL of launcher and ranks, all at once) at a random instant: while it
starts, trains, saves, evaluates or ends. The same command line follows, with `resume=auto`, until it ends by
itself; then the next run begins. Whatever was killed, the losses of all steps, the evaluations and the last
checkpoint must be those of an undisturbed run: to the bit in the same layout, to 1e-12 with `--mixed`,
where each start has other ranks.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchlib.options import parser_of
from benchlib.runs import lines_of
from chaos_lab.jobs import Job, adopt_orphans, descendants, kill, until
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

STEPS, SAVED_EVERY = 240, 8
LIMIT = 1e-12
WHILE_STARTING = 0.2
"""Share of kills before the first step."""
END_SECONDS = 120.0
"""Within which an undisturbed run must have ended."""
RUN = (
    "model=mlp",
    "model.hidden_sizes=[16]",
    "data=synthetic",
    "data.num_samples=109",  # batches of 12, and a last one of 1
    "data.num_test_samples=24",
    "optimizer=adamw",
    "trainer.schedule=cosine",
    "trainer.global_batch_size=12",
    "trainer.max_epochs=null",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every=1",
    "trainer.eval_every=60",
    f"trainer.checkpoint_every={SAVED_EVERY}",
    "trainer.keep_last=2",
    "trainer.precision=float64",
    "launch.start_method=forkserver",
    "hardware.threads_per_rank=1",
    "balancing=equal",
    "logger=none",
    "diagram=false",
    "resume=auto",
)
LAYOUTS = (
    ("hardware.devices=[cpu,cpu]", "strategy=ddp"),
    ("hardware.devices=[cpu,cpu,cpu]", "strategy=ddp", "balancing=manual", "balancing.weights=[2,0,1]"),
    ("hardware=cpu", "strategy=single"),
)
DROPOUT = "model.dropout=0.2"
"""In the same layout only: other ranks draw other masks."""


@dataclass
class Found:
    """The outcome of all kills."""

    kills: int = 0
    runs: int = 0
    restarts: int = 0
    """Starts after a kill that found no checkpoint yet."""
    steps_lost: list[int] = field(default_factory=list)
    """Steps that were logged and done again, of each kill."""
    wrong: list[str] = field(default_factory=list)


@contextmanager
def started(folder: Path, overrides: Sequence[str]) -> Iterator[Job]:
    """Start what `python train.py` does in a fork of this process; its end and its output are discarded."""
    beside = Path(tempfile.mkdtemp(prefix="start_"))  # short: a socket's path may have about 100 characters
    job = Job(folder, overrides, beside=beside)
    try:
        yield job
    finally:
        job.close()
        shutil.rmtree(beside)


def kill_everything(job: Job) -> None:
    """Kill a launcher and all its ranks at one instant, and wait for their end."""
    for pid in (job.pid, *descendants(job.pid)):
        kill(pid)
    gone = until(lambda: job.poll() is not None and not descendants(os.getpid()), 10.0)
    assert gone, f"processes that outlive SIGKILL: {descendants(os.getpid())}"


def logs_a_step(job: Job, folder: Path) -> bool:
    """Wait until a run logs one more step or ends, and return whether it still runs."""
    path = folder / "metrics.jsonl"
    before = path.stat().st_size if path.exists() else 0
    until(lambda: job.poll() is not None or (path.exists() and path.stat().st_size > before), END_SECONDS)
    return job.poll() is None


def logged(folder: Path, key: str) -> dict[int, set[float]]:
    """Return all values that were logged of each step, also before a kill."""
    found: dict[int, set[float]] = {}
    for line in lines_of(folder / "metrics.jsonl"):
        if key in line:
            found.setdefault(line["step"], set()).add(line[key])
    return found


def differences(folder: Path, whole: Path, limit: float) -> list[str]:
    """Return what a killed and resumed run has otherwise than the whole one.

    Args:
        limit: largest relative difference of a loss, and of the last weights; 0: to the bit, and the
            optimizer's state, too.
    """
    wrong = []
    for key in ("train/loss", "eval/loss"):
        ours, theirs = logged(folder, key), logged(whole, key)
        if ours.keys() != theirs.keys():
            wrong.append(f"{key} of steps {sorted(ours.keys() ^ theirs.keys())} is missing or too much")
        for step in ours.keys() & theirs.keys():
            (right,) = theirs[step]
            if any(abs(value - right) > limit * abs(right) for value in ours[step]):
                wrong.append(f"{key} of step {step} is {ours[step]}, not {right}")
    last = f"checkpoints/step_{STEPS:08d}"
    names = ["model.safetensors"] if limit else ["model.safetensors", "optimizer.safetensors"]
    for name in names:
        found, expected = (load_file(place / last / name) for place in (folder, whole))
        for key, wanted in expected.items():
            if float((found[key].double() - wanted.double()).norm()) > limit * float(wanted.double().norm()):
                wrong.append(f"{key} of {name} differs")
    return wrong


def try_out(place: Path, kills: int, seed: int, mixed: bool = False, show: bool = False) -> Found:
    """Kill so many times, and return the outcome.

    Args:
        place: an empty folder.
        mixed: whether each start has other ranks.
        show: print a line for each run.
    """
    draw, found = random.Random(seed), Found()
    common = RUN if mixed else (*RUN, DROPOUT)
    whole = place / "whole" / "run"
    began = time.monotonic()
    with started(whole, (*common, *LAYOUTS[0])) as job:
        logs_a_step(job, whole)
        first_step = time.monotonic()
        if not job.wait(END_SECONDS) or job.code != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{job.screen}")
    starting, training = first_step - began, time.monotonic() - first_step
    while found.kills < kills:
        found.runs += 1
        folder = place / f"{found.runs}" / "run"
        done = False
        for _ in range(draw.choice((1, 2, 3))):
            layout = draw.choice(LAYOUTS) if mixed else LAYOUTS[0]
            with started(folder, (*common, *layout)) as job:
                if draw.random() < WHILE_STARTING:
                    done = job.wait(draw.uniform(0.0, starting))
                else:
                    done = not logs_a_step(job, folder) or job.wait(draw.uniform(0.0, training))
                if not done:
                    kill_everything(job)
                    found.kills += 1
            if done:
                found.wrong += [f"run {found.runs} failed: {job.code}"] if job.code else []
                break
        if not done:
            with started(folder, (*common, *LAYOUTS[0])) as job:
                if not job.wait(END_SECONDS) or job.code != 0:
                    found.wrong.append(f"run {found.runs} did not go on ({job.code}): {job.screen[-2000:]}")
                    continue
        steps = [line["step"] for line in lines_of(folder / "metrics.jsonl") if "train/loss" in line]
        found.steps_lost.append(len(steps) - len(set(steps)))
        found.restarts += steps.count(1) - 1
        wrong = differences(folder, whole, LIMIT if mixed else 0.0)
        found.wrong += [f"run {found.runs}: {one}" for one in wrong]
        if show:
            print(f"run {found.runs}: {found.steps_lost[-1]} steps done again", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the outcome; return 1 if anything differs."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed", action="store_true", help="each start has other ranks")
    options = parser.parse_args(arguments)
    adopt_orphans()
    place = Path(tempfile.mkdtemp(prefix="kill-"))  # ranks are forks: each would clean a TemporaryDirectory
    found = try_out(place, options.kills, options.seed, options.mixed, show=True)
    shutil.rmtree(place)
    table = Table("what", "number")
    for name, number in (
        ("kills of everything", found.kills),
        ("runs", found.runs),
        ("starts without a checkpoint yet", found.restarts),
        ("steps done again, on average", round(sum(found.steps_lost) / max(1, len(found.steps_lost)), 1)),
        ("steps done again, at most in a run", max(found.steps_lost, default=0)),
        ("differences", len(found.wrong)),
    ):
        table.add_row(name, str(number))
    Console().print(table)
    for one in found.wrong:
        print(one, file=sys.stderr)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

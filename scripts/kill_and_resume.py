"""Runs of which everything is killed at random instants, and which then go on by `resume=auto`.

    python scripts/kill_and_resume.py --kills 200 --seed 0 [--mixed]

A small run with dropout is killed (SIGKILL of launcher and ranks, all at once) at a random instant: while it
starts, trains, saves, evaluates or ends. The same command line follows, with `resume=auto`, until it ends by
itself; then the next run begins. Whatever was killed, the losses of all steps, the evaluations and the last
checkpoint must be those of a run that nobody killed: to the bit in the same layout, to 1e-12 with `--mixed`,
where each start has other ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

import psutil
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import hetexp.training.loop
import hetexp.training.measuring.result
import hetexp.training.measuring.warmup_calibration
import hetexp.training.wiring  # noqa: F401 - imported once, for all forks
from hetexp.app import compose_config, run
from hetexp.core.errors import HetexpError
from hetexp.plan.run_spec import Request

STEPS, SAVED_EVERY = 240, 8
LIMIT = 1e-12
WHILE_STARTING = 0.2
"""Share of kills before the first step."""
END_SECONDS = 120.0
"""Within which a run that nobody kills must have ended."""
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
    """What came of all kills."""

    kills: int = 0
    runs: int = 0
    begun_anew: int = 0
    """Starts after a kill that found no checkpoint yet."""
    steps_lost: list[int] = field(default_factory=list)
    """Steps that were logged and done again, of each kill."""
    wrong: list[str] = field(default_factory=list)


def start(folder: Path, overrides: Sequence[str], screen: Path) -> int:
    """Start what `python train.py` does in a fork of this process, and return its id."""
    sys.stdout.flush()
    warm_up()
    pid = os.fork()
    if pid == 0:
        _launch(folder, overrides, screen)
    return pid


def warm_up() -> None:
    """Start the fork server here, so that the launchers that are killed need not start one each."""
    forkserver.set_forkserver_preload(["hetexp.launch.processes.preload", "hetexp.worker"])
    forkserver.ensure_running()


def _launch(folder: Path, overrides: Sequence[str], screen: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        server: Any = forkserver._forkserver
        server.ensure_running = lambda: None  # it is the parent's child, not ours
        with screen.open("a") as file:
            os.dup2(file.fileno(), 2)
            try:
                run(
                    compose_config(overrides),
                    Request(folder, Path.cwd(), overrides=tuple(overrides)),
                    Console(file=file, width=160),
                )
                code = 0
            except HetexpError as error:
                file.write(f"{type(error).__name__}: {error}\n")
            except Exception:
                traceback.print_exc()
    finally:
        os._exit(code)


def kill_everything(pid: int) -> None:
    """Kill a launcher and all its ranks at one instant, and wait for their end."""
    server: Any = forkserver._forkserver
    there = []
    for parent in (pid, server._forkserver_pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            there += psutil.Process(parent).children(recursive=True)
    for target in (pid, *(process.pid for process in there)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
    os.waitpid(pid, 0)
    _, alive = psutil.wait_procs(there, timeout=10)
    assert not alive, f"processes that outlive SIGKILL: {alive}"


def ends(pid: int, seconds: float, until: Path | None = None) -> tuple[int | None, bool]:
    """Return a launcher's exit code, `None` where it does not end in this time.

    Args:
        until: a run's folder: it is not waited any longer once a step more is logged there.

    Returns:
        Whether one was, too.
    """
    deadline = time.monotonic() + seconds
    path = until / "metrics.jsonl" if until is not None else None
    before = path.stat().st_size if path is not None and path.exists() else 0
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), False
        if path is not None and path.exists() and path.stat().st_size > before:
            return None, True
        time.sleep(min(0.002, max(0.0, deadline - time.monotonic())))
    return None, False


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def told(folder: Path, key: str) -> dict[int, set[float]]:
    """Return all values that were logged of each step, also before a kill."""
    found: dict[int, set[float]] = {}
    for line in lines(folder):
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
        ours, theirs = told(folder, key), told(whole, key)
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
    """Kill so many times, and return what came of it.

    Args:
        place: an empty folder.
        mixed: whether each start has other ranks.
        show: print a line for each run.
    """
    draw, found = random.Random(seed), Found()
    common = RUN if mixed else (*RUN, DROPOUT)
    whole, screen = place / "whole" / "run", place / "screen.txt"
    warm_up()
    began = time.monotonic()
    pid = start(whole, (*common, *LAYOUTS[0]), screen)
    code, trains = ends(pid, END_SECONDS, whole)
    trained_from = time.monotonic()
    code = ends(pid, END_SECONDS)[0] if trains else code
    if code != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{screen.read_text()}")
    starting, training = trained_from - began, time.monotonic() - trained_from
    while found.kills < kills:
        found.runs += 1
        folder = place / f"{found.runs}" / "run"
        done = False
        for _ in range(draw.choice((1, 2, 3))):
            pid = start(folder, (*common, *(draw.choice(LAYOUTS) if mixed else LAYOUTS[0])), screen)
            if draw.random() < WHILE_STARTING:
                code, _ = ends(pid, draw.uniform(0.0, starting))
            else:
                code, _ = ends(pid, END_SECONDS, folder)
                code = ends(pid, draw.uniform(0.0, training))[0] if code is None else code
            if code is not None:
                found.wrong += [f"run {found.runs} failed"] if code else []
                done = True
                break
            kill_everything(pid)
            found.kills += 1
        if not done:
            code, _ = ends(start(folder, (*common, *LAYOUTS[0]), screen), END_SECONDS)
            if code != 0:
                found.wrong.append(f"run {found.runs} did not go on ({code}): {screen.read_text()[-2000:]}")
                continue
        steps = [line["step"] for line in lines(folder) if "train/loss" in line]
        found.steps_lost.append(len(steps) - len(set(steps)))
        found.begun_anew += steps.count(1) - 1
        wrong = differences(folder, whole, LIMIT if mixed else 0.0)
        found.wrong += [f"run {found.runs}: {one}" for one in wrong]
        if show:
            print(f"run {found.runs}: {found.steps_lost[-1]} steps done again", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what came of it; return 1 where anything differs."""
    parser = argparse.ArgumentParser(description="Kill everything at random instants, and resume.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed", action="store_true", help="each start has other ranks")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        found = try_out(Path(place), options.kills, options.seed, options.mixed, show=True)
    table = Table("what", "number")
    for name, number in (
        ("kills of everything", found.kills),
        ("runs", found.runs),
        ("starts without a checkpoint yet", found.begun_anew),
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

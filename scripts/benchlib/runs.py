"""Runs of hetexp and groups of ranks, and what they leave behind."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.app import check, compose_config, run
from hetexp.core.config import Config
from hetexp.core.plan import Plan
from hetexp.plan.planner import make_plan
from hetexp.plan.run_spec import Request

SCRIPTS = Path(__file__).resolve().parent.parent
RANKS_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Run:
    """What a run of hetexp left behind."""

    folder: Path
    summary: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return Plan.read(self.folder / "plan.json")

    @property
    def emulation(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "emulation.json").read_text(encoding="utf-8"))
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` that are about steps."""
        return [row for row in lines_of(self.folder / "metrics.jsonl") if "step_seconds" in row]

    def step_seconds(self, after: int) -> float:
        """Return the mean seconds of the steps after the first so many."""
        seconds, before = 0.0, after
        for row in self.rows:
            if row["step"] > after:
                seconds += row["step_seconds"] * (row["step"] - before)
                before = row["step"]
        return seconds / (before - after)

    def last_split(self) -> tuple[int, ...]:
        """Return the samples of each device at the end of the run."""
        row, total = self.rows[-1], self.plan.config["trainer"]["global_batch_size"]
        return tuple(round(row[f"device/{device.id}/share"] * total) for device in self.plan.devices)


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of metrics, which may grow meanwhile; none before it is there."""
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def start(folder: Path, overrides: Sequence[str]) -> Run:
    """Run hetexp once in a new folder below this one."""
    return start_in(Path(tempfile.mkdtemp(dir=folder)) / "run", overrides)


def start_in(folder: Path, overrides: Sequence[str]) -> Run:
    """Run hetexp once in this folder."""
    console = Console(file=io.StringIO(), width=200)
    words = tuple(overrides)
    return Run(folder, run(compose_config(words), Request(folder, Path.cwd(), overrides=words), console))


def planned(overrides: Sequence[str], folder: Path = Path("unused")) -> tuple[Plan, Config]:
    """Return the plan of a run, without running.

    Raises:
        ConfigError: the run would not start.
    """
    spec = check(compose_config(overrides), Request(folder, Path.cwd())).accepted()
    return make_plan(spec), spec.config


def free_port() -> int:
    """Return a port of this machine that no process listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def keep(path: Path | None, results: Any) -> None:
    """Write results as JSON, if there is a file for them."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def start_ranks(
    command: Sequence[str], world_size: int, environment: dict[str, str], cards: dict[str, str] | None = None
) -> str:
    """Run one script as so many ranks, as torchrun would, and return what rank 0 printed.

    Args:
        cards: variables by which all ranks see the same cards; by default they see none.

    Raises:
        RuntimeError: a rank failed; carries the end of what it wrote.
    """
    shared = {**os.environ, **environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": str(world_size), **(cards or {})}
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(world_size):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        outputs = [process.communicate(timeout=RANKS_TIMEOUT_SECONDS) for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} of {' '.join(command)} failed:\n{errors[-2000:]}")
    return outputs[0][0]

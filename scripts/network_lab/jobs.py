"""One training over the boxes of a lab, started as torchrun's variables ask, and what it sent and took."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hetexp
from network_lab.boxes import Box

TRAIN = Path(hetexp.__file__).resolve().parent.parent / "train.py"
PORT = 29400
LIMIT_SECONDS = 400.0


@dataclass(frozen=True)
class Ran:
    """What a training over the boxes left behind."""

    summary: dict[str, Any]
    losses: list[float]
    step_seconds: float
    """Median of the log lines but the first."""
    sent_bytes: int
    """That left all boxes together after the first log line: measuring and the self-test are before it."""
    screen: str


def run(lab: Sequence[Box], ranks_a_box: int, folder: Path, overrides: Sequence[str]) -> Ran:
    """Train on so many CPU ranks in each box.

    Raises:
        RuntimeError: a rank failed; carries rank 0's screen.
    """
    folder.mkdir(parents=True)
    size, before = len(lab) * ranks_a_box, 0
    words = [sys.executable, str(TRAIN), "hardware=cpu", f"hydra.run.dir={folder / 'run'}", *overrides]
    processes, screen = [], folder / "screen_0.txt"
    for node, box in enumerate(lab):
        for local in range(ranks_a_box):
            rank = node * ranks_a_box + local
            own = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": local,
                "GROUP_RANK": node,
                "MASTER_ADDR": lab[0].address,
                "MASTER_PORT": PORT,
                "OMP_NUM_THREADS": 1,
            }
            environment = os.environ | {name: str(value) for name, value in own.items()}
            with (folder / f"screen_{rank}.txt").open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        box.command(*words),
                        env=environment,
                        cwd=folder,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
    metrics = folder / "run" / "metrics.jsonl"
    try:
        while all(process.poll() is None for process in processes):
            if metrics.exists() and metrics.stat().st_size:
                before = sum(box.sent_bytes() for box in lab)
                break
            time.sleep(0.01)
        codes = [process.wait(LIMIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    text = screen.read_text(encoding="utf-8", errors="replace")
    if any(codes):
        raise RuntimeError(f"exit codes {codes}:\n{text[-3000:]}")
    return read(folder / "run", sum(box.sent_bytes() for box in lab) - before, text)


def alone(folder: Path, overrides: Sequence[str]) -> Ran:
    """Train on one CPU rank outside the boxes."""
    words = [sys.executable, str(TRAIN), "hardware=cpu", f"hydra.run.dir={folder / 'run'}", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True)
    done = subprocess.run(
        words, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    return read(folder / "run", 0, done.stdout)


def read(run_dir: Path, sent_bytes: int, screen: str) -> Ran:
    """Return what a run's folder tells."""
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    seconds = statistics.median(row["step_seconds"] for row in rows[1:] or rows)
    return Ran(summary, [row["train/loss"] for row in rows], seconds, sent_bytes, screen)

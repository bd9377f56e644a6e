"""One training over the boxes of a lab, each a machine of a cluster, and what it sent and took."""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hetexp
from network_lab.boxes import Box

TRAIN = Path(hetexp.__file__).resolve().parent.parent / "train.py"
LIMIT_SECONDS = 400.0


@dataclass(frozen=True)
class Ran:
    """What a training over the boxes left behind."""

    summary: dict[str, Any]
    losses: list[float]
    step_seconds: float
    """Mean from the first log line on: an exchange now and then is a part of it."""
    sent_bytes: int
    """That left all boxes together after the first log line: measuring and the self-test are before it."""


def run(lab: Sequence[Box], ranks_a_box: int, folder: Path, home: Path, overrides: Sequence[str]) -> Ran:
    """Train on so many CPU ranks in each box.

    Args:
        home: folder of what the boxes keep from run to run; of a link's own.

    Raises:
        RuntimeError: a launcher failed; carries the leader's screen.
    """
    run_dir = folder / lab[0].name / "run"
    metrics, before = run_dir / "metrics.jsonl", 0
    with started(lab, ranks_a_box, folder, home, overrides) as processes:
        while all(process.poll() is None for process in processes):
            if metrics.exists() and metrics.stat().st_size:
                before = sum(box.sent_bytes() for box in lab)
                break
            time.sleep(0.01)
    return read(run_dir, sum(box.sent_bytes() for box in lab) - before)


def predicted(
    lab: Sequence[Box], ranks_a_box: int, folder: Path, home: Path, overrides: Sequence[str]
) -> dict[str, float]:
    """Return the seconds a step that the planner foretells with equal shares, by strategy.

    What it knows of the devices is what a run with the same `home` has measured.
    """
    with started(lab, ranks_a_box, folder, home, [*overrides, "plan_only=true"]):
        pass
    found = json.loads((folder / lab[0].name / "run" / "prediction.json").read_text(encoding="utf-8"))
    rows = [row for row in found["rows"] if row["policy"] in ("equal", None) and row["predicted_step_s"]]
    return {row["strategy"]: row["predicted_step_s"] for row in rows}


@contextmanager
def started(
    lab: Sequence[Box], ranks_a_box: int, folder: Path, home: Path, overrides: Sequence[str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the same command in each box, the first of which leads, and wait for their ends.

    Raises:
        RuntimeError: one failed; carries the leader's screen.
    """
    folder.mkdir(parents=True)
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    devices = f"[{{device: cpu, count: {ranks_a_box}}}]"
    hosts = ",".join(f"{{name: {box.name}, address: {box.address}, devices: {devices}}}" for box in lab)
    words = [
        sys.executable,
        str(TRAIN),
        f"cluster.hosts=[{hosts}]",
        f"cluster.token_file={token}",
        *overrides,
    ]
    processes = []
    try:
        for box in lab:
            own = folder / box.name
            own.mkdir()
            environment = {"HETEXP_HOME": str(home / box.name), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
            with (own / "screen.txt").open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        box.command(*words, f"node={box.name}", f"hydra.run.dir={own / 'run'}"),
                        env=os.environ | environment,
                        cwd=own,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
        codes = [process.wait(LIMIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.terminate()
    if any(codes):
        screen = (folder / lab[0].name / "screen.txt").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"exit codes {codes}:\n{screen[-3000:]}")


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
    return read(folder / "run", 0)


def read(run_dir: Path, sent_bytes: int) -> Ran:
    """Return what a run's folder tells."""
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "train/loss" in row]
    seconds = statistics.mean(row["step_seconds"] for row in rows[1:] or rows)
    return Ran(summary, [row["train/loss"] for row in rows], seconds, sent_bytes)

"""`hetexp sync` with W&B's own command, against a server on this machine that takes what comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from wandb_files import without_wandb_variables
from wandb_server import Server

MAKE_RUNS = """
import json, sys
from pathlib import Path
from hetexp.logger.base import RunInfo
from hetexp.logger.wandb import WandbLogger

for run_id, steps in json.loads(sys.argv[2]).items():
    run_dir = Path(sys.argv[1]) / run_id
    run_dir.mkdir(parents=True)
    (run_dir / "plan.json").write_text(json.dumps({"run_id": run_id}))
    logger = WandbLogger(project="proj", mode="offline")
    logger.start(RunInfo(run_id, run_dir, run_id, "my-sweep", "sweep", ("emulated",), {}))
    for step in steps:
        logger.log({"train/loss": 1 / step}, step)
    logger.finish({"status": "completed"}, 0)
    (run_dir / "summary.json").write_text("{}")
"""
STEPS = {"first": [1, 2, 3, 4], "refused": [1, 2], "resumed": [3, 4, 5, 6]}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def test_each_point_of_each_run_is_sent_once(server: Server, tmp_path: Path) -> None:
    """One run is refused, the others are sent; asked again, only that one is tried."""
    environment = without_wandb_variables() | {
        "HOME": str(tmp_path),
        "WANDB_BASE_URL": server.address,
        "WANDB_API_KEY": "0" * 40,
    }
    environment.setdefault("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )

    made = call("-c", MAKE_RUNS, str(tmp_path / "runs"), json.dumps(STEPS))
    assert made.returncode == 0, made.stderr
    done = call("-m", "hetexp.cli", "sync", "runs", "--timeout", "60")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"  {tmp_path / 'runs' / 'refused'}", done.stderr
    assert done.stdout.count("synced  ") == 2
    sent = {
        run_id: [(line["trainer/step"], line["train/loss"]) for line in lines]
        for run_id, lines in server.history.items()
    }
    # Steps 3 and 4 are of two runs, and both have them.
    assert sent == {name: [(s, 1 / s) for s in STEPS[name]] for name in ("first", "resumed")}
    first = next(run for run in server.runs if run["name"] == "first")
    assert (first["project"], first["groupName"], first["jobType"]) == ("proj", "my-sweep", "sweep")
    assert first["tags"] == ["emulated"]
    assert sorted(server.artifacts) == ["first-run", "resumed-run"]

    again = call("-m", "hetexp.cli", "sync", "runs", "--timeout", "60")
    assert again.returncode == 1 and "synced  " not in again.stdout
    assert {run_id: len(lines) for run_id, lines in server.history.items()} == {"first": 4, "resumed": 4}

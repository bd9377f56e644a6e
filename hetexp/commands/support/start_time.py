"""`hetexp doctor --start-up`: the stages of a training's start, until the first step has ended."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ONE_STEP = ("trainer.max_steps=1", "trainer.eval_every=0", "trainer.checkpoint_every=0")


def show_start_up(overrides: Sequence[str], as_json: bool) -> int:
    """Train one step in a folder that is removed, print each stage's seconds, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="hetexp_start_up_") as folder:
        words = [*overrides, *ONE_STEP, f"hydra.run.dir={folder}/run"]
        command = [sys.executable, "-m", "hetexp.cli", "train", *words]
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        summary = Path(folder, "run", "summary.json")
        if ended.returncode or not summary.is_file():
            print(f"{ended.stdout}{ended.stderr}".strip(), file=sys.stderr)
            return ended.returncode or 1
        stages: list[dict[str, Any]] = json.loads(summary.read_text(encoding="utf-8"))["start_up"]
    if as_json:
        print(json.dumps(stages, indent=2))
        return 0
    for row in stages:
        print(f"{row['seconds']:8.2f} s  {row['stage']}")
    print(f"{sum(row['seconds'] for row in stages):8.2f} s  from the command to the end of the first step")
    return 0

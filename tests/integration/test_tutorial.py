"""Each command of the tutorial runs, in its order, with fewer steps than there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hetexp

ROOT = Path(hetexp.__file__).resolve().parent.parent
TUTORIAL = re.sub(r" \\\n +", " ", (ROOT / "docs/tutorial.md").read_text(encoding="utf-8"))
BLOCK = re.compile(r"^```\n((?:(?:make|\.|python|hetexp) .*\n)+)```$", re.MULTILINE)
BEFORE = ["make setup", ". .venv/bin/activate"]
"""What has made the interpreter that runs this test."""
FEWER = ["trainer.max_steps=3", "trainer.max_epochs=null", "logger=none"]
FASTER = "hardware.time_scale=4"
"""Of emulated cards."""


def commands() -> list[list[str]]:
    blocks = "".join(BLOCK.findall(TUTORIAL)).splitlines()
    lines = [line.partition(" #")[0].strip() for line in blocks]
    assert lines[: len(BEFORE)] == BEFORE
    return [shlex.split(line) for line in lines[len(BEFORE) :]]


def as_run_here(words: list[str]) -> list[str]:
    program, *rest = words
    if program == "hetexp":
        return [sys.executable, "-m", "hetexp.cli", *rest]
    assert [program, rest[0]] == ["python", "train.py"]
    is_emulated = "hardware=nvidia_arc" in rest or "+experiment=compare_strategies" in rest
    fewer = [] if "--help" in rest else FEWER + [FASTER] * is_emulated
    keys = tuple(word.partition("=")[0] + "=" for word in fewer)
    kept = [word for word in rest[1:] if not keys or not word.startswith(keys)]
    return [sys.executable, str(ROOT / "train.py"), *kept, *fewer]


def run(command: list[str], folder: Path) -> str:
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.mark.timeout(600)
def test_the_tutorial(tmp_path: Path) -> None:
    """Whether its emulated runs are valid depends on the machine's load and is not tested."""
    screens = [run(as_run_here(words), tmp_path) for words in commands()]
    assert sum("emulated:0" in screen for screen in screens) >= 2
    assert all(screen for screen in screens)
    assert (tmp_path / "outputs/sweeps/tutorial/report.html").exists()
    assert (tmp_path / "outputs/sweeps/tutorial/report.svg").exists()
    summaries = list((tmp_path / "outputs").rglob("summary.json"))
    assert len(summaries) == 7  # the first run, four of the sweep, and the last two

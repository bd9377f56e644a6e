"""Everything is killed at random instants; the same command goes on, and nothing tells the difference."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_and_resume.py"


@pytest.mark.skipif(sys.platform != "linux", reason="adopts orphans and reads /proc")
def test_kills_of_everything_leave_no_trace_in_the_training() -> None:
    """Losses, evaluations, weights and moments to the bit, dropout included."""
    command = [sys.executable, str(SCRIPT), "--kills", "2", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    numbers = dict(re.findall(r"│ (.*?) +│ ([\d.]+) +│", done.stdout))
    assert int(numbers["kills of everything"]) >= 2
    assert numbers["differences"] == "0"

"""Everything is killed at random instants; the same command goes on, and nothing tells the difference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kill_and_resume import try_out


@pytest.mark.skipif(sys.platform != "linux", reason="launchers are forked from this process")
def test_kills_of_everything_leave_no_trace_in_the_training(tmp_path: Path) -> None:
    """Losses, evaluations, weights and moments to the bit, dropout included."""
    found = try_out(tmp_path, kills=2, seed=7)
    assert found.wrong == []
    assert found.kills >= 2

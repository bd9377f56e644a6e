"""The measurement of the input path runs as a person types it, and its table says what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_each_way_of_loading_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_input.py"), "--only", "synthetic, mlp"]
    options = ["--steps", "10", "--rounds", "2", "--batch", "8", "--threads", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["one by one", "in the step", "thread"]
    for rounds in found.values():
        assert len(rounds) == 2
        assert all(0 < data < step for data, step in rounds)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_input

    timed = {way: [(1.0, 1.0), (1e-5, 1e-4), (1e-6, 2e-4)] for way in found}
    assert bench_input.row("a, b", timed) == "| a, b |" + " 10 | 100 | 10.0% |" * 3

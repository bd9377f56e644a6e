"""A few of the kills of `scripts/chaos.py`: one of each kind, in which everything must hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_lab.orders import ENDS, KINDS, drawn

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"
SEEDS = (0, 12, 24, 58, 26, 5, 6, 18, 8, 20, 10)
"""One of each kind, at a moment at which the run trains whatever the speed of the machine."""


def test_the_seeds_are_of_all_kinds() -> None:
    assert {drawn(seed).kind for seed in SEEDS} == set(KINDS)
    assert drawn(7) == drawn(7) != drawn(8)


@pytest.mark.timeout(600)  # about 40 s where nothing else runs
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="adopts orphans and reads /proc")
def test_whatever_is_killed_the_training_is_the_same(tmp_path: Path) -> None:
    out = tmp_path / "chaos.jsonl"
    words = ["--seeds", ",".join(map(str, SEEDS)), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["seed"] for row in rows] == list(SEEDS)
    for row in rows:
        expected = {"went on"} if row["kind"] in ENDS else {"survived"}
        assert row["problems"] == [] and row["result"] in expected, row
    again = subprocess.run(
        [sys.executable, str(SCRIPT), "--table", str(out)], capture_output=True, text=True, check=True
    )
    assert f"| **all** | {len(SEEDS)} |" in again.stdout

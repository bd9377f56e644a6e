"""A run where neither the terminal nor the name of the folder is UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from launched import TINY, Launched

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
DATA = """
# größe
import torch
from torch.utils.data import TensorDataset


def points():
    print("größe – 3 × 2")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(dim=1))


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(8, 3))
"""


def test_ascii_terminal_and_latin_1_folder(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "own_points.py").write_text(DATA, encoding="utf-8")
    run = Launched(
        folder,
        *(word for word in TINY if not word.startswith(("model", "data"))),
        "model=custom",
        "model._target_=own_points.Net",
        "data=custom",
        "data._target_=own_points.points",
        "trainer.max_steps=3",
        "hydra.run.dir=run",
        environment=ASCII,
        run_dir=folder / "run",
    )
    assert run.wait() == 0, run.screen
    assert run.summary["status"] == "completed"
    assert run.screen.isascii()
    assert "caf\\xe9" in run.screen
    assert "größe – 3 × 2" in (run.run_dir / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert [line["step"] for line in run.metrics if "train/loss" in line] == [1, 2, 3]
    command = [sys.executable, "-m", "hetexp.cli", "report", "run"]
    report = subprocess.run(
        command, cwd=folder, env={**os.environ, **ASCII}, capture_output=True, text=True, timeout=100
    )
    assert report.returncode == 0, report.stderr
    page = next(path for path in folder.rglob("report.html"))
    page.read_text(encoding="utf-8")
    json.loads((run.run_dir / "plan.json").read_text(encoding="utf-8"))

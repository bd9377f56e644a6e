"""`hetexp init` with answers from a pipe writes what trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.Linear(32 * 32, num_classes))
"""


def test_the_experiment_of_five_answers_trains(tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(NET)
    environment = {**os.environ, "HETEXP_HOME": str(tmp_path / "home")}

    def hetexp(*words: str, answers: str = "") -> None:
        ended = subprocess.run(
            [sys.executable, "-m", "hetexp.cli", *words],
            input=answers,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    hetexp("init", answers="cpu,cpu\n\nmy_net.Net\n\nnone\n")
    hetexp("train", "experiment=mine", "trainer.max_steps=2", "balancing=equal", "monitor=none")
    (path,) = tmp_path.glob("outputs/*/*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("completed", 2, 2)
    config = (path.parent / "config.yaml").read_text()
    assert "my_net.Net" in config

"""Data that a person mends between two starts of a sweep, and a look at the process that runs its jobs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from faulty import Data, my_rank
from hydra.experimental.callback import Callback


class Mended(Data):
    """Four numbers a sample and two classes.

    Args:
        note: any text, list or date.
        broken: file whose first line is the note of the runs that fail, as long as it is there.
    """

    def __init__(self, note: Any, broken: str) -> None:
        super().__init__()
        path = Path(broken)
        self.broken = path.exists() and path.read_text() == str(note)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.broken and my_rank() == 1:
            raise RuntimeError("this sample is broken")
        return super().__getitem__(index)


class Watch(Callback):
    """Writes down what each job left changed of its process's environment."""

    def on_job_start(self, config: Any, **_: Any) -> None:
        self.before = dict(os.environ)

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        names = self.before.keys() | os.environ.keys()
        changed = sorted(name for name in names if self.before.get(name) != os.environ.get(name))
        (Path(config.hydra.runtime.output_dir) / "changed.json").write_text(json.dumps(changed))

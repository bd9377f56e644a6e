"""A data set as a person may write one, slow enough that a run with it leaves the machine to others."""

from __future__ import annotations

import threading
import time

import torch
from torch.utils.data import get_worker_info


class Slow:
    """Four numbers a sample and two classes.

    Args:
        hang_after: samples after which reading never returns in a data loader's process; null: never.
    """

    facts = {"input_shape": [4], "num_classes": 2}

    def __init__(self, hang_after: int | None = None) -> None:
        self.hang_after = hang_after
        self.read = 0

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        if self.hang_after is not None and get_worker_info() is not None and self.read > self.hang_after:
            threading.Event().wait()
        time.sleep(0.01)
        return torch.ones(4), torch.tensor(index % 2)

"""A model of which half is frozen, on ranks whose shared memory is watched, or spoiled."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import nn

from hetexp.comm.shared_memory.exchange import SharedMemoryExchange


class HalfFrozen(nn.Module):
    """Two layers, of which the first is not trained.

    The environment of a rank says what becomes of its shared memory: `COUNTED` is a folder in which each rank
    writes down the bytes of each of its sums, `SPOILED=1` lets rank 1 get zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 512).requires_grad_(False)
        self.trained = nn.Linear(512, 4)
        if re.search(r"rank_\d+\.log", str(Path("/proc/self/fd/1").readlink())):  # not in the launcher
            _watch()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.trained(torch.tanh(self.frozen(inputs)))
        return output


def _watch() -> None:
    sums, gathers = SharedMemoryExchange.sum_, SharedMemoryExchange.gather
    spoiled = os.environ.get("SPOILED") == "1"

    def sum_(self: SharedMemoryExchange, tensor: torch.Tensor) -> None:
        _write(self.rank, tensor)
        sums(self, tensor)
        if spoiled and self.rank == 1:
            tensor.zero_()

    def gather(self: SharedMemoryExchange, tensor: torch.Tensor) -> list[torch.Tensor]:
        _write(self.rank, tensor)
        return gathers(self, tensor)

    SharedMemoryExchange.sum_ = sum_  # type: ignore[method-assign]
    SharedMemoryExchange.gather = gather  # type: ignore[method-assign]


def _write(rank: int, tensor: torch.Tensor) -> None:
    folder = os.environ.get("COUNTED")
    if folder is not None:
        with Path(folder, f"rank_{rank}.txt").open("a") as file:
            file.write(f"{tensor.numel() * tensor.element_size()}\n")

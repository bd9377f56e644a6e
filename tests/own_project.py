"""A person's own project, written into an empty folder: modules, and `conf/` with options of every kind."""

from __future__ import annotations

from pathlib import Path

MODULES = {
    "my_points.py": """\
import torch
from torch.utils.data import Dataset


class Points(Dataset):
    facts = {"width": 8, "num_classes": 3}

    def __init__(self, num_samples=64):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_samples, 8, generator=generator)
        self.y = self.x[:, :3].argmax(dim=1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]
""",
    "my_net.py": """\
from torch import nn

import hetexp


class Net(nn.Module):
    def __init__(self, hidden: int, width=None, num_classes=None):
        super().__init__()
        print("a rank's hetexp is", hetexp.__file__)
        self.mine = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, x):
        return self.mine(x)
""",
}
CONF = {
    "model/mine.yaml": "_target_: my_net.Net\nhidden: 16\n",
    "model/mlp.yaml": "_target_: my_net.Net\nhidden: 4\n",  # instead of the shipped one
    "data/mine.yaml": "_target_: my_points.Points\n",
    "hardware/my_box.yaml": "devices: [cpu, cpu]\nthreads_per_rank: 1\n",
    "experiment/mine.yaml": """\
# @package _global_
defaults:
  - override /model: mine
  - override /data: mine
  - override /hardware: my_box
  - override /logger: none
trainer:
  max_steps: 3
  max_epochs: null
  global_batch_size: 16
""",
    "job.yaml": """\
defaults:
  - config
  - override model: mine
  - override data: mine
  - _self_
trainer:
  max_steps: 7
""",
}


def write_project(folder: Path) -> Path:
    """Write the project and return its folder."""
    for name, text in (MODULES | {f"conf/{name}": text for name, text in CONF.items()}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder

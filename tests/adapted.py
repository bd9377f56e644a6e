"""A model as people fine-tune it: frozen weights, an adapter, parts that not every sample needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter.

    Args:
        pooler: whether there is a trained layer that no pass uses.
        branch: whether a layer is used by the first samples of the data set only (their inputs are small).
    """

    def __init__(self, pooler: bool = False, branch: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(16, 32).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False))
        self.pooler = nn.Linear(32, 32) if pooler else None
        self.branch = nn.Linear(16, 32) if branch else None
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.base(inputs) + self.adapter(inputs)
        chosen = inputs[:, :1] > 1.2
        if self.branch is not None and bool(chosen.any()):
            hidden = hidden + self.branch(inputs) * chosen
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.as_tensor(hidden)


class Dropping(nn.Module):
    """Tells its weights before the first pass in training, and which values that pass has dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 4)])
        self.told = False

    def forward(self, inputs: Tensor) -> Tensor:
        dropped = nn.functional.dropout(torch.ones(64), 0.5, self.training)
        if self.training and not self.told:
            self.told = True
            print("weights", [p.double().sum().item() for p in self.parameters()])
            print("mask", (dropped > 0).int().tolist(), flush=True)
        hidden = self.layers[0](inputs).tanh() * dropped
        return torch.as_tensor(self.layers[1](hidden))

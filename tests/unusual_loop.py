"""A script with its own loop over one of `unusual_models`: `unusual_loop.py CASE FOLDER`, in float64.

Every rank writes the weights that it has at the end to `FOLDER/<ranks>_<rank>.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import unusual_models
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hetexp

STEPS = 6


def make(case: str) -> tuple[nn.Module, TensorDataset]:
    """Return model and data of a case."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    if case == "sparse":
        words = torch.randint(32, (40, 3), generator=generator)
        return unusual_models.SparseWords().double(), TensorDataset(words, words.roll(1, dims=1))
    model: nn.Module = {"lazy": unusual_models.LazyLayers, "spectral": unusual_models.Lipschitz}.get(
        case, unusual_models.RunningMean
    )()
    return model.double(), TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    model, data = make(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hetexp.setup(model, optimizer, data, global_batch_size=16, seed=3, run_dir=folder / "alone")
    while run.step < STEPS:
        for inputs, targets in run.batches():
            output = run.model(inputs)
            run.backward(functional.cross_entropy(output.flatten(0, -2), targets.flatten()))
            run.clip_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
            if run.step == STEPS:
                break
    torch.save(model.state_dict(), folder / f"{run.world_size}_{run.rank}.pt")


if __name__ == "__main__":
    main()

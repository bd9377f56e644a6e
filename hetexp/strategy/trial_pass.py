"""Trial passes over a few samples that leave the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetexp.core.call import call_model
from hetexp.hardware.emulation.pacing import tensors


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Let the block use the model in training mode; restore its buffers, modes and the CPU's generator."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def try_out(model: nn.Module, inputs: Any) -> list[Tensor | None]:
    """Run forward and backward once; the model's own hooks do not run, and no gradient is kept.

    Returns:
        The gradients of the trained parameters, `None` for unused ones.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    output = call_model(model.forward, inputs)
    sums = [t.sum() for t in tensors(output) if t.requires_grad]
    if not sums:
        return [None] * len(trained)
    total = torch.stack([s.real if s.is_complex() else s for s in sums]).sum()
    return list(torch.autograd.grad(total, trained, allow_unused=True))


def used_parameters(model: nn.Module, inputs: Any) -> list[nn.Parameter]:
    """Return the trained parameters that a pass over these inputs gives a gradient."""
    with undisturbed(model):
        gradients = try_out(model, inputs)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p, gradient in zip(trained, gradients, strict=True) if gradient is not None]

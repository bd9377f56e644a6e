"""Spectral norms without samples: each training pass improves their estimate, whatever the samples are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from hetexp.torch_private import forward_pre_hooks, spectral_norm_class


def spectral_iterations(model: nn.Module) -> list[Callable[[], None]]:
    """Return, for each layer with a spectral norm, the power iteration that a training pass makes.

    Both of torch's forms count: `torch.nn.utils.parametrizations.spectral_norm`, and the older
    `torch.nn.utils.spectral_norm`.
    """
    new = spectral_norm_class()
    old = sys.modules[
        "torch.nn.utils.spectral_norm"
    ].SpectralNorm  # a function of torch has the module's name
    found: list[Callable[[], None]] = []
    for module in model.modules():
        for hook in forward_pre_hooks(module):
            if isinstance(hook, old):
                found.append(partial(_iterate, module, partial(hook, module, None)))
        if is_parametrized(module):
            assert isinstance(module.parametrizations, nn.ModuleDict)
            for name, steps in module.parametrizations.items():
                if any(isinstance(step, new) for step in steps.children()):
                    found.append(partial(_iterate, module, partial(getattr, module, name)))
    return found


@torch.no_grad()
def _iterate(module: nn.Module, compute: Callable[[], object]) -> None:
    if module.training:
        compute()

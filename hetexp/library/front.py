"""The module that a script calls in place of its model: data parallel while a batch is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Call(tuple[tuple[Any, ...], dict[str, Any]]):
    """The arguments of one call of a model as a single value, since strategies' wrappers pass one on."""


class Called(nn.Module):
    """Calls a model with the arguments of a `Call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Call) -> Any:
        args, kwargs = call
        return self.model(*args, **kwargs)


class Front(nn.Module):
    """Stands for the model: the same parameters, modes, methods and attributes, called through the run.

    Args:
        model: the user's own.
        through: handles each call.
    """

    def __init__(self, model: nn.Module, through: Callable[[Call], Any]) -> None:
        super().__init__()
        self.module = model
        self._through = through

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(Call((args, kwargs)))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Restore every module's mode (training or evaluation) after the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def keeping_statistics(model: nn.Module) -> Iterator[None]:
    """Let a forward pass normalise by the running statistics, without changing them or any other buffer.

    Layers such as BatchNorm neither learn from the samples nor refuse a single one. All other layers stay in
    training mode.
    """
    layers = [m for m in model.modules() if m.training and getattr(m, "running_mean", None) is not None]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with keeping_modes(model), torch.no_grad():
        for layer in layers:
            layer.training = False
        yield
        for buffer, before in kept:
            buffer.copy_(before)

"""Gives lazy layers their shapes by one call of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hetexp.core.call import call_model
from hetexp.core.errors import ConfigError
from hetexp.model.base import type_in
from hetexp.torch_private import tree_map_only


def lazy_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that get their shape with the model's first call."""
    named = chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]


def call_once(model: nn.Module, inputs: Any, fix: str = "Call it once where it is built.") -> None:
    """Call a model with lazy layers once, so that all its tensors have shapes; others are left alone.

    The call is one in evaluation mode, and one in training mode if layers are left that only training uses.
    Buffers that have a shape before keep their values.

    Args:
        inputs: of a small batch; floating-point ones are used in the model's type, by default float32.
        fix: the last sentence of the error.

    Raises:
        ConfigError: the call fails, or leaves a layer without a shape.
    """
    names = lazy_names(model)
    if not names:
        return
    tensors = list(chain(model.parameters(), model.buffers()))
    device = tensors[0].device
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    inputs = tree_map_only(torch.Tensor, lambda t: t.to(device, type_in(t, dtype)), inputs)
    reason = "its first call left them without a shape"
    with as_before(model), torch.no_grad():
        for training in (False, True):
            try:
                call_model(model.train(training), inputs)
            except Exception as error:  # the user's own code
                reason = f"its first call failed ({type(error).__name__}: {_first_line(error)})"
            if not lazy_names(model):
                return
    left = lazy_names(model)
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    raise ConfigError(
        f"`model` must have shapes for all its tensors, but {', '.join(left[:3])}{more} are of lazy layers, "
        f"and {reason}. {fix}"
    )


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Restore modes, and those buffers that have values, after the block."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers() if not is_lazy(buffer)]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

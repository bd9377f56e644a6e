"""Computes a layer's activations again in backward instead of keeping them (Chen et al. 2016).

Only the inputs of layers are kept. It is `torch.utils.checkpoint` without reentry around each layer, with two
differences. The state of the random generators is kept for every kind of device. Operations that must happen
once (a BatchNorm's exchange of statistics, the running mean) are not repeated (`once`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetexp.core.errors import ConfigError
from hetexp.model.layered import pieces_of
from hetexp.torch_private import tree_leaves

Value = TypeVar("Value")
_here = threading.local()
"""`call`: the layer's call in this thread; backward may run in another thread than forward."""


def once(compute: Callable[[], Value]) -> Value:
    """Return the result of `compute`, or its first result while a layer is recomputed."""
    call: _Call | None = getattr(_here, "call", None)
    if call is None:
        return compute()
    return call.remember(compute)


def recompute_layers(model: nn.Module) -> list[str]:
    """Let the model's layers keep no activations; names and weights stay as they are.

    Layers are those of `hetexp.model.layered.pieces_of`, else the children of the outermost `nn.Sequential`
    and `nn.ModuleList`.

    Returns:
        The names of the layers.

    Raises:
        ConfigError: the model has no such layers.
    """
    names = layer_names(model)
    if not names:
        raise ConfigError(
            "`trainer.activation_checkpointing` must be false for a model without layers to compute again "
            f"({type(model).__name__}), but is True instead. Give it a method `pieces`, or keep its layers "
            "in an nn.Sequential or nn.ModuleList."
        )
    for name in names:
        layer = model.get_submodule(name)
        if not isinstance(layer.__dict__.get("forward"), _Recomputed):  # a layer may have two names
            layer.forward = _Recomputed(layer)
    return names


def recomputes(model: nn.Module) -> bool:
    """Return whether a layer of the model keeps no activations."""
    return any(isinstance(module.__dict__.get("forward"), _Recomputed) for module in model.modules())


def layer_names(model: nn.Module) -> list[str]:
    """Return the dotted names of a model's layers, as far as they are known."""
    pieces = pieces_of(model)
    if pieces is not None:
        return list(pieces.layer_names)
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name == other or name.startswith(f"{other}.") for other in names)
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and not inside:
            names += [f"{name}.{child}" for child, _ in module.named_children()]
    return names


def rebind(model: nn.Module) -> None:
    """Bind the layers of a shallow copy (`torch.nn.parallel.replicate`) to the copy."""
    for module in model.modules():
        stand_in = module.__dict__.get("forward")
        if isinstance(stand_in, _Recomputed):
            module.forward = stand_in.of(module)


class _Recomputed:
    """Replaces a layer's `forward`."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._forward = layer.__dict__.get("forward")
        """An earlier replacement of the method, if any."""

    def of(self, layer: nn.Module) -> _Recomputed:
        """Return the replacement for a copy of the layer."""
        other = _Recomputed(layer)
        other._forward = self._forward
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward or type(self._layer).forward.__get__(self._layer)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # torch's compiler keeps the generators' states by itself
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        call = _Call([t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # `_Call` keeps the state for every kind of device
            context_fn=lambda: (call.first(), call.again()),
            **kwargs,
        )


class _Call:
    """One call of a layer, with the results that it keeps until it is recomputed.

    Args:
        tensors: tensors among the call's arguments.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._devices = list({t.device for t in tensors if t.device.type not in ("cpu", "meta")})
        self._states: list[torch.Tensor] = []
        self._kept: list[Any] = []
        self._next: int | None = None
        """Place of the next kept result while the layer is recomputed; `None` before."""

    def remember(self, compute: Callable[[], Value]) -> Value:
        if self._next is None:
            self._kept.append(compute())
            value: Value = self._kept[-1]
            return value
        self._next += 1
        value = self._kept[self._next - 1]
        return value

    @contextmanager
    def first(self) -> Iterator[None]:
        """Surround the forward pass."""
        self._states = self._generators()
        self._kept.clear()
        with self._entered():
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Surround the recomputation in backward."""
        now = self._generators()
        self._set_generators(self._states)
        self._next = 0
        try:
            with self._entered():
                yield
        finally:
            self._next = None
            self._set_generators(now)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before, _here.call = getattr(_here, "call", None), self
        try:
            yield
        finally:
            _here.call = before

    def _generators(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        for device in self._devices:
            module = torch.get_device_module(device)
            # Apple's has one generator for its one device, and takes no argument for it.
            states.append(module.get_rng_state() if device.type == "mps" else module.get_rng_state(device))
        return states

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            module = torch.get_device_module(device)
            module.set_rng_state(state) if device.type == "mps" else module.set_rng_state(state, device)

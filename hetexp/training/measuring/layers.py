"""Counts the work and the memory of each layer of a run's model before anything starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hetexp.core.call import call_model
from hetexp.core.config import Config
from hetexp.core.errors import ConfigError, logged
from hetexp.core.stage import Layer
from hetexp.hardware.memory.estimate import on_meta
from hetexp.hardware.memory.functions import CardFunctions
from hetexp.model.layered import Pieces, call_layer, pieces_of
from hetexp.optimizer.build import build_optimizer
from hetexp.torch_private import storage_key, tree_leaves, tree_map_only
from hetexp.training.measuring.estimate import RunMemory

log = logging.getLogger(__name__)

SIZES = (2, 3)
"""Samples of two passes, whose difference is that of one sample; batch norms refuse a single sample."""
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class _Pass:
    """Forward and backward of one layer with a number of samples."""

    flops: int
    kept_bytes: int
    """Saved for backward, without weights and buffers."""
    output_bytes: int


def describe_layers(
    config: Config, built: RunMemory, precision: str = "float32", emulated: bool = False
) -> tuple[Layer, ...]:
    """Return the layers between which a pipeline may cut the run's model.

    Args:
        built: holds the run's model, its loss and a sample.
        precision: of most ranks, and so of the activations.
        emulated: whether the ranks will count the model on the CPU, as emulated devices do; otherwise it is
            counted without data, or on the CPU if it needs values.

    Raises:
        ConfigError: the model may not be cut, or could not be built or called.
    """
    if built.reason is not None:
        raise ConfigError(f"`model` must be one that can be built and called, but: {built.reason}.")
    if pieces_of(built.model) is None:
        kind = config.model["_target_"]
        raise ConfigError(
            "`model` must say where it may be cut (a method `pieces`, see hetexp.model.layered) if a "
            f"strategy cuts it into stages, but {kind} does not. strategy=ddp trains it whole."
        )
    passes = None
    with on_meta(built.model) as model:
        states = _states(config, model)
        if not emulated or built.large:
            with logged("the model's layers are measured with values, as they need them"):
                passes = _passes(model, built, precision)
    if passes is None:
        model = built.model_with_values().train()
        try:
            passes = _passes(model, built, precision)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ConfigError(
                "`model` must work piece by piece (its method `pieces`, see hetexp.model.layered), but does "
                f"not: {type(error).__name__}: {first_line}."
            ) from error
    return _layers(built.model, states, passes)


def _layers(
    model: nn.Module, states: dict[str, int], passes: Sequence[tuple[_Pass, _Pass]]
) -> tuple[Layer, ...]:
    pieces = pieces_of(model)
    assert pieces is not None
    flops = [few.flops + more.flops for few, more in passes]
    total = sum(flops)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = []
    for index, name in enumerate(pieces.layer_names):
        held = _tensors(model, pieces, index)
        parameters = [tensor for tensor in held if isinstance(tensor, nn.Parameter)]
        few, more = passes[index]
        layers.append(
            Layer(
                name=name,
                work=flops[index] / total if total else 1 / len(passes),
                weight_bytes=_bytes(parameters),
                trained_bytes=_bytes([p for p in parameters if p.requires_grad]),
                buffer_bytes=_bytes([t for t in held if not isinstance(t, nn.Parameter)]),
                activation_bytes=max(0, more.kept_bytes - few.kept_bytes),
                output_bytes=max(0, more.output_bytes - few.output_bytes),
                state_bytes=sum(states[names[id(p)]] for p in parameters),
            )
        )
    return tuple(layers)


def _passes(model: nn.Module, built: RunMemory, precision: str) -> list[tuple[_Pass, _Pass]]:
    """Return each layer's pass with few samples, and its pass with one more."""
    few, more = (_run(model, built, precision, size) for size in SIZES)
    return list(zip(few, more, strict=True))


def _run(model: nn.Module, built: RunMemory, precision: str, size: int) -> list[_Pass]:
    pieces = pieces_of(model)
    assert pieces is not None
    first = next((p for p in model.parameters()), torch.empty(0))
    inputs, targets = (_sized(part, size, first) for part in built.sample)
    payload: Any = inputs
    passes = []
    for index, name in enumerate(pieces.layer_names):
        is_last = index == len(pieces.layer_names) - 1
        call = _layer_call(model, pieces, name, index == 0, is_last)
        held = [tensor for tensor in tree_leaves(payload) if isinstance(tensor, torch.Tensor)]
        around = [*model.parameters(), *model.buffers(), *([] if index else held)]
        with _saved(around) as kept, FlopCounterMode(display=False) as counter:
            with _as_on_device(first, precision):
                # Views: the counter's hooks on a module's arguments refuse leaves.
                output = call(tree_map_only(torch.Tensor, lambda tensor: tensor.view_as(tensor), payload))
                result = built.local_loss(output, targets) if is_last else output
            with _as_on_device(first, precision):  # a layer that computes its activations again does so here
                _backward(result, [*model.parameters(), *held])
        sent = 0 if is_last else _bytes([t for t in tree_leaves(output) if isinstance(t, torch.Tensor)])
        passes.append(_Pass(counter.get_total_flops(), _storage_bytes(kept), sent))
        # As the next rank receives it: a leaf with a gradient of its own.
        payload = tree_map_only(torch.Tensor, _received, output)
    return passes


def _layer_call(
    model: nn.Module, pieces: Pieces, name: str, is_first: bool, is_last: bool
) -> Callable[[Any], Any]:
    """Return a function that calls a layer; the first and the last one include the model's begin and end."""
    layer = model.get_submodule(name)

    def call(payload: Any) -> Any:
        if is_first:
            payload = call_model(pieces.begin, payload)
        output = call_layer(layer, payload)
        return pieces.finish(output) if is_last else output

    return call


def _backward(result: Any, inputs: Sequence[torch.Tensor]) -> None:
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    if tensors and leaves:
        ones = [torch.ones_like(tensor) for tensor in tensors]
        torch.autograd.grad(tensors, leaves, ones, allow_unused=True)


@contextlib.contextmanager
def _saved(around: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield a list that autograd fills with the tensors that it saves, except those in `around`."""
    excluded = {storage_key(tensor) for tensor in around}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in excluded:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@contextlib.contextmanager
def _as_on_device(weight: torch.Tensor, precision: str) -> Iterator[None]:
    """Let the model run the functions that it would run on a device of this precision."""
    if weight.is_meta:
        functions = CardFunctions(precision, fused_attention=True)
        with functions:
            yield
        functions.forget()
    elif precision in _HALF:
        with torch.autocast("cpu", _HALF[precision]):
            yield
    else:
        yield


def _states(config: Config, model: nn.Module) -> dict[str, int]:
    """Return the bytes of optimizer state of each parameter of a model on the meta device.

    If the optimizer cannot step without values, two moments of the parameter's size are assumed: most
    optimizers keep as much or less.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        optimizer = build_optimizer(config.optimizer, model)
        for group in optimizer.param_groups:
            group.update({key: False for key in ("fused", "foreach") if group.get(key)})
        optimizer.step()
    except Exception as error:  # the user's own optimizer may read values, or want a closure
        log.info("the optimizer's state is taken for two values a parameter: %r", error)
        trained = {name: 2 * _bytes([p]) for name, p in model.named_parameters() if p.requires_grad}
        return {name: trained.get(name, 0) for name, _ in model.named_parameters()}
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    return {
        name: _bytes([t for t in tree_leaves(optimizer.state.get(p, {})) if isinstance(t, torch.Tensor)])
        for name, p in model.named_parameters()
    }


def _tensors(model: nn.Module, pieces: Pieces, index: int) -> list[torch.Tensor]:
    """Return the parameters and buffers that a layer holds, each once."""
    names = [pieces.layer_names[index]]
    names += pieces.begin_names if index == 0 else ()
    names += pieces.finish_names if index == len(pieces.layer_names) - 1 else ()
    held: dict[int, torch.Tensor] = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        value = getattr(model.get_submodule(owner), last)
        tensors = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
        held |= {id(tensor): tensor for tensor in tensors}
    return list(held.values())


def _sized(value: Any, size: int, like: torch.Tensor) -> Any:
    """Return a sample's inputs or targets `size` times, on the device and in the floating type of `like`."""

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
        whole = tensor[:1].expand(size, *tensor.shape[1:]) if tensor.dim() else tensor
        return whole.contiguous().to(like.device, dtype)

    return tree_map_only(torch.Tensor, repeat, value)


def _received(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad and tensor.is_floating_point())


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())

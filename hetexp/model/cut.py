"""Cuts a model into pieces of consecutive layers, and removes the layers that a rank does not compute.

The remaining modules keep their names of the whole model; the memory of the others is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hetexp.core.call import call_model
from hetexp.core.errors import ConfigError
from hetexp.model.layered import Pieces, call_layer, pieces_of
from hetexp.torch_private import BatchNormBase


@dataclass(frozen=True)
class Whole:
    """The names of a whole model, for a rank that keeps a part of it."""

    pieces: Pieces
    parameters: dict[str, str]
    """Each name of a parameter → the first name of the same tensor, in the model's order."""
    buffers: tuple[str, ...]
    trained: frozenset[str]
    """First names of the parameters that require a gradient."""

    @classmethod
    def of(cls, model: nn.Module, pieces: Pieces) -> Whole:
        """Return the names of a whole model."""
        first: dict[nn.Parameter, str] = {}
        named = list(model.named_parameters(remove_duplicate=False))
        for name, parameter in named:
            first.setdefault(parameter, name)
        return cls(
            pieces,
            {name: first[parameter] for name, parameter in named},
            tuple(name for name, _ in model.named_buffers(remove_duplicate=False)),
            frozenset(name for parameter, name in first.items() if parameter.requires_grad),
        )

    def names_of(self, ranges: Iterable[tuple[int, int]]) -> list[str]:
        """Return the modules and parameters that some ranges of layers use."""
        names: list[str] = []
        for start, end in ranges:
            names += self.pieces.begin_names if start == 0 else ()
            names += self.pieces.layer_names[start:end]
            names += self.pieces.finish_names if end == len(self.pieces.layer_names) else ()
        return [*names, *self.pieces.shared_names]

    def parameters_of(self, ranges: Iterable[tuple[int, int]]) -> set[str]:
        """Return the first names of the parameters that some ranges of layers hold."""
        names = self.names_of(ranges)
        return {first for name, first in self.parameters.items() if _within(name, names)}

    def buffers_of(self, ranges: Iterable[tuple[int, int]]) -> set[str]:
        """Return the names of the buffers that some ranges of layers hold."""
        names = self.names_of(ranges)
        return {name for name in self.buffers if _within(name, names)}


def whole_of(model: nn.Module) -> Whole:
    """Return the names of a model that is about to be cut.

    Raises:
        ConfigError: the model has no pieces, names parts that it lacks, has state outside of its pieces, or
            normalises over the batch.
    """
    pieces = pieces_of(model)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if pieces is None:
        raise ConfigError(
            f"`model` must say where it may be cut to be trained in stages, but {kind} has no method "
            "`pieces` (see hetexp.model.layered). strategy=ddp trains any model."
        )
    if not pieces.layer_names:
        raise ConfigError(f"`model` must have at least one layer to be cut, but {kind} has none.")
    whole = Whole.of(model, pieces)
    existing = {name for name, _ in model.named_modules(remove_duplicate=False)}
    existing |= {*whole.parameters, *whole.buffers}
    problems = [
        f"`model` must have what its pieces name, but {kind} has no {name}."
        for name in pieces.names
        if name not in existing
    ]
    outside = [name for name in (*whole.parameters, *whole.buffers) if not _within(name, pieces.names)]
    if outside:
        problems.append(
            f"`model` must name all of its state in `pieces`, but {kind} leaves out {', '.join(outside[:3])}."
        )
    over_batch = [name for name, module in model.named_modules() if isinstance(module, BatchNormBase)]
    if over_batch:
        problems.append(
            f"`model` must not normalise over the batch to be trained in stages, but {over_batch[0]} does: "
            "its statistics would be those of a microbatch. GroupNorm or LayerNorm would be exact."
        )
    if problems:
        raise ConfigError(problems)
    return whole


class Piece(nn.Module):
    """Some consecutive layers of a model as a module, which shares them with the model.

    The first piece takes the model's inputs and the last one gives its output.
    """

    def __init__(self, model: nn.Module, pieces: Pieces, start: int, end: int) -> None:
        super().__init__()
        names = pieces.layer_names
        self._begin = pieces.begin if start == 0 else None
        self._finish = pieces.finish if end == len(names) else None
        self.layers = nn.ModuleList(model.get_submodule(name) for name in names[start:end])
        ends = [*(pieces.begin_names if start == 0 else ())]
        ends += pieces.finish_names if end == len(names) else ()
        ends += pieces.shared_names
        modules = dict(model.named_modules(remove_duplicate=False))
        self.ends = nn.ModuleList(modules[name] for name in ends if name in modules)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.end_parameters = nn.ParameterList(parameters[name] for name in ends if name in parameters)

    def forward(self, payload: Any = None, **inputs: Any) -> Any:
        """Return the input of the next piece, or the model's output."""
        payload = inputs if payload is None else payload
        if self._begin is not None:
            payload = call_model(self._begin, payload)
        for layer in self.layers:
            payload = call_layer(layer, payload)
        return payload if self._finish is None else self._finish(payload)


def keep_only(model: nn.Module, whole: Whole, ranges: Sequence[tuple[int, int]]) -> None:
    """Remove everything from a model that these ranges of layers do not use, in place.

    `nn.Identity` replaces modules, and `None` single parameters and buffers.
    """
    _drop(model, "", set(whole.pieces.names), set(whole.names_of(ranges)))


def _drop(module: nn.Module, prefix: str, named: set[str], kept: set[str]) -> None:
    for tensors in (module._parameters, module._buffers):
        for name in list(tensors):
            if prefix + name in named - kept:
                tensors[name] = None
    for name, child in list(module._modules.items()):
        path = prefix + name
        if child is None or path in kept:
            continue
        if path in named:
            module._modules[name] = nn.Identity()
        else:
            _drop(child, f"{path}.", named, kept)


def _within(name: str, places: Iterable[str]) -> bool:
    """Return whether a parameter's or buffer's name is one of `places`, or inside one of these modules."""
    return any(name == place or name.startswith(f"{place}.") for place in places)

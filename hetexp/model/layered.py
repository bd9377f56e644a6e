"""How a model says where a pipeline may cut it: between its layers, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hetexp.model.hooks import ModelHooks


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Pieces:
    """A model as `finish(layer(… layer(begin(inputs))))`.

    What goes from piece to piece is a tensor whose first dimension counts samples, or a tuple of them.
    """

    layer_names: tuple[str, ...]
    """Dotted names of the layers' modules, in their order."""
    begin_names: tuple[str, ...] = ()
    """Modules and parameters that `begin` uses, none of them within a layer; a tied weight under the name
    that it has here."""
    finish_names: tuple[str, ...] = ()
    """The same of `finish`."""
    begin: Callable[[Any], Any] = _as_it_is
    """From the model's inputs to what the first layer takes; a method of the model at hand. Inputs that are a
    dict become its keyword arguments, as they do for the model."""
    finish: Callable[[Any], Any] = _as_it_is
    """From what the last layer gives to the model's output."""
    shared_names: tuple[str, ...] = ()
    """Modules without parameters that every layer needs, such as tables of positions: each piece has them."""
    uniform: bool = False
    """Whether each layer gives what it takes in shape and type, so that both are known without a run."""


class LayerChain(nn.Module):
    """A model whose `layers` follow each other, so that it may be cut between any two of them."""

    layers: nn.Sequential

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the last layer."""
        output: Tensor = self.layers(inputs)
        return output

    def pieces(self) -> Pieces:
        """Return the layers, between which the model may be cut."""
        return Pieces(tuple(f"layers.{index}" for index in range(len(self.layers))))


def pieces_of(model: nn.Module) -> Pieces | None:
    """Return the pieces that a model's own method `pieces` tells, or those of an `nn.Sequential`.

    `None` if the model says nothing: then it must not be cut.
    """
    if isinstance(model, ModelHooks):  # what it does between steps it does as a whole
        return None
    tell = getattr(model, "pieces", None)
    if callable(tell):
        pieces: Pieces = tell()
        return pieces
    children = dict(model.named_children())
    if isinstance(model, nn.Sequential):
        return Pieces(tuple(children))
    return None


def call_layer(layer: nn.Module, payload: Any) -> Any:
    """Call a layer with what the piece before it gave; a tuple becomes its arguments."""
    return layer(*payload) if isinstance(payload, tuple) else layer(payload)

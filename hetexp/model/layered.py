"""The interface by which a model says where a pipeline may cut it: between its layers only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hetexp.model.hooks import ModelHooks


def _identity(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Pieces:
    """A model as `finish(layer(… layer(begin(inputs))))`.

    The payload between pieces is a tensor whose first dimension counts samples, or a tuple of such tensors.
    """

    layer_names: tuple[str, ...]
    """Dotted names of the layers' modules, in their order."""
    begin_names: tuple[str, ...] = ()
    """Modules and parameters that `begin` uses, none within a layer; a tied weight by its name here."""
    finish_names: tuple[str, ...] = ()
    """Modules and parameters that `finish` uses, likewise."""
    begin: Callable[[Any], Any] = _identity
    """Maps the model's inputs to the first layer's; a method of the model. A dict of inputs becomes keyword
    arguments, as for the model."""
    finish: Callable[[Any], Any] = _identity
    """Maps the last layer's output to the model's."""
    shared_names: tuple[str, ...] = ()
    """Modules without parameters that every layer needs, such as tables of positions; each piece has them."""
    uniform: bool = False
    """Whether each layer keeps shape and type of its input, so that both are known without a run."""

    @property
    def names(self) -> list[str]:
        """Names of all modules and parameters of the pieces."""
        return [*self.begin_names, *self.layer_names, *self.finish_names, *self.shared_names]


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
    """Return the result of a model's method `pieces`, or the children of an `nn.Sequential`.

    `None` for other models, which must not be cut.
    """
    if isinstance(model, ModelHooks):  # its hooks between steps need the whole model
        return None
    method = getattr(model, "pieces", None)
    if callable(method):
        pieces: Pieces = method()
        return pieces
    children = dict(model.named_children())
    if isinstance(model, nn.Sequential):
        return Pieces(tuple(children))
    return None


def call_layer(layer: nn.Module, payload: Any) -> Any:
    """Call a layer with the payload of the piece before; a tuple becomes its arguments."""
    return layer(*payload) if isinstance(payload, tuple) else layer(payload)

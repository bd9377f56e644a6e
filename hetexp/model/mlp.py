"""A multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from torch import nn

from hetexp.core.errors import ConfigError
from hetexp.model.base import unknown
from hetexp.model.layered import LayerChain

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


class MLP(LayerChain):
    """Fully connected layers, from inputs [batch, *input_shape] to logits [batch, num_classes].

    Args:
        hidden_sizes: width of each hidden layer; `[]` makes a linear model.
        input_shape: shape of one input; `None`: the data's.
        num_classes: number of outputs; `None`: the data's.
        dropout: chance to drop a hidden value while training.
        activation: activation after each hidden layer.

    Raises:
        ConfigError: `input_shape` or `num_classes` is not known.
    """

    def __init__(
        self,
        hidden_sizes: Sequence[PositiveInt] = (64, 64),
        input_shape: Annotated[Sequence[PositiveInt], Field(min_length=1)] | None = None,
        num_classes: PositiveInt | None = None,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        activation: Literal["relu", "gelu", "silu", "tanh"] = "relu",
    ) -> None:
        super().__init__()
        if input_shape is None or num_classes is None:
            raise ConfigError(unknown(input_shape=input_shape, num_classes=num_classes))
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for size in hidden_sizes:
            layers += [nn.Linear(width, size), ACTIVATIONS[activation]()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = size
        layers.append(nn.Linear(width, num_classes))
        self.layers = nn.Sequential(*layers)

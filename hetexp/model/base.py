"""Builds a model from the configuration and the data's facts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hetexp.core.config.weights import without_weights
from hetexp.core.errors import ConfigError, must_build
from hetexp.core.instantiate import instantiate, parameters
from hetexp.model.recompute import recompute_layers
from hetexp.torch_private import apply_to_tensors


class WithAuxiliary(NamedTuple):
    """A model's result in training, with an auxiliary loss beside the loss of its output.

    The loss of each element of a sample (`hetexp.training.loss`) grows by the sample's auxiliary loss. So a
    mean over the batch weighs it like the sample, and any split of the batch gives the same sum.
    """

    output: Any
    """The model's result without an auxiliary loss."""
    auxiliary: Tensor
    """[batch], the loss of each sample, which depends on no other sample."""
    tally: Tensor | None = None
    """[batch, n], the model's counts of each sample (`hetexp.model.hooks`), integers or booleans."""


def build_model(node: Mapping[str, Any], facts: Mapping[str, Any], recompute: bool = False) -> nn.Module:
    """Build the model that the `model` section describes.

    Arguments of the model's signature that are absent or null in the section are taken from `facts`.

    Args:
        node: the section, with `_target_`.
        facts: arguments that the data determines (see `hetexp.data.base.DataSource.facts`).
        recompute: whether its layers recompute their activations in backward (`hetexp.model.recompute`).

    Raises:
        ConfigError: the model refuses its arguments, is no `torch.nn.Module`, or has no layers to
            recompute.
    """
    accepted = parameters(node["_target_"])
    node = without_weights(node, accepted)
    given = {name: value for name, value in facts.items() if name in accepted and node.get(name) is None}
    built = instantiate(node, **given)
    if not isinstance(built, nn.Module):
        raise ConfigError(must_build("model._target_", "a torch.nn.Module", built))
    if recompute:
        recompute_layers(built)
    return built


def type_in(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor in a run of this floating-point type: complex and whole numbers stay so."""
    if tensor.is_floating_point():
        return dtype
    return dtype.to_complex() if tensor.is_complex() else tensor.dtype


def to_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Turn a model's floating-point tensors into a type, and complex ones into the complex type of its width.

    `Module.to` would keep the real part of complex tensors only.
    """
    if not any(tensor.is_complex() for tensor in chain(model.parameters(), model.buffers())):
        return model.to(dtype)
    apply_to_tensors(model, lambda tensor: tensor.to(type_in(tensor, dtype)))
    return model


def unknown(**given: object) -> list[str]:
    """Return a sentence for each argument that neither the configuration nor the data gives."""
    missing = [key for key, value in given.items() if value is None]
    return [
        f"`model.{key}` must be given if the data does not give it, but is null instead." for key in missing
    ]

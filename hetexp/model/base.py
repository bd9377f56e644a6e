"""Builds a model from the configuration and the data's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from hetexp.core.errors import ConfigError, must_build
from hetexp.core.instantiate import instantiate, parameters
from hetexp.model.recompute import recompute_layers


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
    given = {name: value for name, value in facts.items() if name in accepted and node.get(name) is None}
    built = instantiate(node, **given)
    if not isinstance(built, nn.Module):
        raise ConfigError(must_build("model._target_", "a torch.nn.Module", built))
    if recompute:
        recompute_layers(built)
    return built


def unknown(**given: object) -> list[str]:
    """Return a sentence for each argument that neither the configuration nor the data gives."""
    missing = [key for key, value in given.items() if value is None]
    return [
        f"`model.{key}` must be given if the data does not give it, but is null instead." for key in missing
    ]

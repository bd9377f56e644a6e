"""How the configuration and the data's facts become a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import instantiate, parameters
from hetexp.model.recompute import recompute_layers


class WithAuxiliary(NamedTuple):
    """What a model returns while it trains that has a loss of its own beside the one on its output.

    The loss of a sample's elements (`hetexp.training.loss`) grows by the sample's auxiliary loss at each of
    them: a mean over the batch weighs it as it weighs the sample, and any split of the batch adds up to it.
    """

    output: Any
    """What the model returns otherwise."""
    auxiliary: Tensor
    """[batch], a loss of each sample that depends on no other sample."""
    tally: Tensor | None = None
    """[batch, n], what the model counts of each sample (`hetexp.model.hooks`), integers or booleans."""


def build_model(node: Mapping[str, Any], facts: Mapping[str, Any], recompute: bool = False) -> nn.Module:
    """Build the model that the `model` section describes.

    Arguments of the model's signature that the section leaves out or null are taken from `facts`.

    Args:
        node: the section, with `_target_`.
        facts: arguments that the data decides (see `hetexp.data.base.DataSource.facts`).
        recompute: whether its layers compute their activations again in backward (`hetexp.model.recompute`).

    Raises:
        ConfigError: the model refuses its arguments, is no `torch.nn.Module`, or has no layers to compute
            again.
    """
    wanted = parameters(node["_target_"])
    decided = {name: value for name, value in facts.items() if name in wanted and node.get(name) is None}
    built = instantiate(node, **decided)
    if not isinstance(built, nn.Module):
        kind = type(built)
        raise ConfigError(
            "`model._target_` must build a torch.nn.Module, "
            f"but builds a {kind.__module__}.{kind.__qualname__} instead."
        )
    if recompute:
        recompute_layers(built)
    return built


def unknown(**given: object) -> list[str]:
    """Return a sentence for each argument that neither the configuration nor the data gives."""
    missing = [key for key, value in given.items() if value is None]
    return [
        f"`model.{key}` must be given if the data does not tell it, but is null instead." for key in missing
    ]

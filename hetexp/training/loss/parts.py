"""The tensor that a loss takes, of a model's output or of targets in several parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetexp.core.errors import ConfigError, must_be

Key = str | int
"""A key of a dict, an attribute's name, or a place in a tuple."""
OUTPUTS = ("logits", "out")
"""Names of the output in Hugging Face's and torchvision's models."""
TARGETS = ("labels", "label")


def output_part(output: Any, key: Key | None) -> torch.Tensor:
    """Return a tensor of a model's output.

    Without a key it is `logits` or `out`, the only tensor, or the first of a tuple whose others have other
    shapes.

    Raises:
        ConfigError: it is in doubt, or is no tensor.
    """
    return _part(output, key, OUTPUTS, "loss.output", "the model's output")


def target_part(targets: Any, key: Key | None) -> torch.Tensor:
    """Return a tensor of the targets: without a key `labels` or `label`, or the only tensor.

    Raises:
        ConfigError: it is in doubt, or is no tensor.
    """
    return _part(targets, key, TARGETS, "loss.target", "the targets")


def part(value: Any, key: Key, name: str) -> Any:
    """Return an entry of a dict, an attribute, or a place of a tuple.

    Args:
        name: Hydra key, for the message.

    Raises:
        ConfigError: there is none.
    """
    try:
        if isinstance(key, int):
            return tuple(value.values())[key] if isinstance(value, Mapping) else value[key]
        return value[key] if isinstance(value, Mapping) else getattr(value, key)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ConfigError(must_be(name, _names(value), key)) from None


def _part(value: Any, key: Key | None, usual: tuple[str, ...], name: str, what: str) -> torch.Tensor:
    if key is not None:
        found = part(value, key, name)
    elif isinstance(value, torch.Tensor):
        return value
    else:
        found = _usual(value, usual, first=usual is OUTPUTS)
    if not isinstance(found, torch.Tensor):
        why = f"`trainer.loss` takes one tensor, but {what} is a {type(value).__qualname__}."
        raise ConfigError(must_be(name, _names(value), key, why))
    return found


def _usual(value: Any, usual: tuple[str, ...], first: bool) -> Any:
    """Return the part that leaves no doubt, else `None`."""
    for name in usual:
        found = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if isinstance(found, torch.Tensor):
            return found
    if isinstance(value, Mapping):
        all_parts = list(value.values())
    elif isinstance(value, (tuple, list)):
        all_parts = list(value)
    else:
        all_parts = list(getattr(value, "__dict__", {}).values())
    tensors = [entry for entry in all_parts if isinstance(entry, torch.Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    is_tuple = first and isinstance(value, (tuple, list)) and tensors and value[0] is tensors[0]
    if is_tuple and all(other.shape != tensors[0].shape for other in tensors[1:]):
        return tensors[0]
    return None


def _names(value: Any) -> str:
    """Return the keys of a value as text, for a message."""
    if isinstance(value, Mapping):
        return f"one of {', '.join(map(str, value))}" if value else "null for a dict without entries"
    if isinstance(value, (tuple, list)):
        return f"a number from 0 to {len(value) - 1}" if value else "null for an empty tuple"
    if isinstance(value, torch.Tensor):
        return "null for a single tensor"
    names = [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
    return f"one of {', '.join(names)}" if names else "the name of a part"

"""The keys of the section `data` that hetexp itself reads: samples, and how they become batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field

from hetexp.core.section import Section

Key = str | Annotated[int, Field(ge=0)]
"""Name of a part of a dict or an object, or position in a tuple."""

COLLATE = {"pad": "hetexp.data.collate.Pad", "list": "hetexp.data.collate.collate_list"}
"""Names of `data.collate` and their dotted paths."""


class SampleKeys(Section):
    """The keys of `data` that hetexp itself reads, unless the class names an argument of the same name."""

    inputs: Key | list[Key] | None = None
    """Parts of a sample that the model gets. A list of names gives keyword arguments, a single name or
    position gives the only argument; `null`: all parts but the targets."""
    targets: Key | list[Key] | None = None
    """Parts of a sample that the loss gets. A single name or position gives the part itself, a list of names
    gives a dict; `null`: the second part of `(inputs, targets)`, or all of a dict."""
    collate: str | dict[str, Any] | None = None
    """What makes a batch of samples. `pad` pads sequences to the longest of the batch, `list` keeps lists; or
    the dotted path of a function, or `_target_` with arguments; `null`: torch's `default_collate`."""
    evaluation: Annotated[float, Field(gt=0, lt=1)] | dict[str, Any] | None = None
    """Evaluation data: another `_target_` with arguments, or the part of the training samples that
    `trainer.seed` draws; `null`: what the data itself has."""


def sample_keys(node: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return the values of hetexp's own keys in the section `data`.

    Args:
        named: arguments that the section's class names in its signature.
    """
    return {name: node[name] for name in SampleKeys.model_fields if name in node and name not in named}


def class_arguments(node: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return the section `data` without hetexp's own keys.

    `null`, the default of these keys, is never an argument of the class.

    Args:
        named: arguments that the section's class names in its signature.
    """
    own = SampleKeys.model_fields
    return {name: v for name, v in node.items() if name not in own or (name in named and v is not None)}

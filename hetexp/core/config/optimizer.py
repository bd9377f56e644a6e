"""hetexp's own keys of the section `optimizer`, beside the arguments of its class."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Discriminator, Field, Tag

from hetexp.core.section import Section

Pattern = Annotated[str, Field(min_length=1)]


class GroupConfig(Section):
    """Parameters with options of their own: `match`, and the optimizer's options that differ, as `lr`."""

    model_config = ConfigDict(extra="allow")

    match: Pattern | Annotated[list[Pattern], Field(min_length=1)]
    """Pattern of the parameters' names, or several; `*` stands for any characters."""


class OptimizerKeys(Section):
    """The keys that hetexp itself reads."""

    groups: (
        Annotated[
            Annotated[list[GroupConfig], Tag("list")] | Annotated[dict[str, GroupConfig], Tag("mapping")],
            Discriminator(lambda value: "list" if isinstance(value, list) else "mapping"),
        ]
        | None
    ) = None
    """Parameters with options of their own: a list, or a mapping with a name for each group. A parameter
    belongs to the first group with a `match` for its name, as in `[{match: "head.*", lr: 0.01}]`; the other
    keys of a group are options of the optimizer."""
    no_decay: bool = False
    """Whether biases, norms and other parameters of one dimension have no weight decay. A group with its own
    `weight_decay` keeps it."""


def group_entries(groups: list[GroupConfig] | dict[str, GroupConfig] | None) -> dict[str, GroupConfig]:
    """Return the groups by their Hydra keys, in the order in which they are tried."""
    if isinstance(groups, dict):
        return {f"optimizer.groups.{name}": group for name, group in groups.items()}
    return {f"optimizer.groups[{number}]": group for number, group in enumerate(groups or ())}

"""Divides a model's parameters into the optimizer's groups, by their names (`optimizer.groups`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hetexp.core.config import group_entries, optimizer_keys
from hetexp.core.errors import ConfigError, did_you_mean, must_be
from hetexp.core.instantiate import locate

MATCH = "match"


@dataclass(frozen=True)
class Groups:
    """The groups of a whole model's parameters.

    A stage of a pipeline holds a part of the parameters, and has all groups nevertheless: some may be empty.
    """

    options: tuple[dict[str, Any], ...]
    """Of each group, those that differ from the optimizer's own."""
    of: Mapping[str, int]
    """Every name of a trained parameter → its group. Tied parameters have several names."""

    @property
    def single(self) -> bool:
        """Whether all parameters have the optimizer's own options."""
        return self.options in ((), ({},))

    def divide(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups of the parameters that a model, or a part of it, holds."""
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in self.options]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (name in self.of or parameter.numel()):
                # A rank without trained parameters has an empty one that is not the model's.
                groups[self.of[name]]["params"].append(parameter)
        return groups


def parameter_groups(section: Mapping[str, Any], model: nn.Module) -> Groups:
    """Divide the trained parameters of a whole model as the section `optimizer` says.

    Args:
        section: with `_target_`. A static method `kinds(model, section)` of its class divides further: it
            returns a group's options for each name of a parameter, those of the first group first.

    Raises:
        ConfigError: a pattern matches no trained parameter.
    """
    keys, problems = optimizer_keys(dict(section))
    if keys is None:
        raise ConfigError(problems)
    names = _names(model)
    kinds = getattr(locate(str(section["_target_"])), "kinds", None)
    by_class: Mapping[str, dict[str, Any]] = kinds(model, section) if callable(kinds) else {}
    chosen, problems = _first_matches(keys.groups, names)
    if problems:
        raise ConfigError(problems)
    without_decay = _without_decay(model) if keys.no_decay else set()
    entries = list(group_entries(keys.groups).values())
    options: dict[tuple[int, str, bool], dict[str, Any]] = {}
    place: dict[str, tuple[int, str, bool]] = {}
    for first, several in names.items():
        number = chosen.get(first, -1)
        own = dict(entries[number].model_extra or {}) if number >= 0 else {}
        kind = by_class.get(first, {})
        decays = "weight_decay" in own or first not in without_decay
        group = (number, str(kind), not decays)
        options[group] = {**kind, **({} if decays else {"weight_decay": 0.0}), **own}
        place |= dict.fromkeys(several, group)
    kind_order = [str(kind) for kind in (*by_class.values(), {})]
    order = sorted(options, key=lambda group: (group[0], kind_order.index(group[1]), group[2]))
    return Groups(tuple(options[g] for g in order), {name: order.index(g) for name, g in place.items()})


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each trained parameter, by its first name."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return names


def _first_matches(groups: Any, names: Mapping[str, Sequence[str]]) -> tuple[dict[str, int], list[str]]:
    """Return the first group that matches each parameter, and the problems of patterns without one."""
    chosen: dict[str, int] = {}
    problems: list[str] = []
    for number, (key, group) in enumerate(group_entries(groups).items()):
        for pattern in [group.match] if isinstance(group.match, str) else group.match:
            found = [
                first for first, several in names.items() if any(fnmatchcase(n, pattern) for n in several)
            ]
            if not found:
                problems.append(_matches_nothing(f"{key}.{MATCH}", pattern, names))
            elif all(chosen.get(first, number) != number for first in found):
                fix = "The first group that matches a parameter has it: put this one before."
                accepted = "a pattern of parameters that no group before it has"
                problems.append(must_be(f"{key}.{MATCH}", accepted, pattern, fix))
            for first in found:
                chosen.setdefault(first, number)
    return chosen, problems


def _matches_nothing(key: str, pattern: str, names: Mapping[str, Sequence[str]]) -> str:
    known = [name for several in names.values() for name in several]
    shown = ", ".join(known[:6]) + (f" and {len(known) - 6} more" if len(known) > 6 else "")
    hint = did_you_mean(pattern, known) or f" They are {shown}."
    return f"`{key}` must match a trained parameter of the model, but '{pattern}' matches none.{hint}"


def _without_decay(model: nn.Module) -> set[str]:
    """Return the first names of biases, parameters of norms, and others of at most one dimension."""
    return {
        name
        for module_name, module in model.named_modules()
        for name, parameter in _own_parameters(module_name, module)
        if parameter.dim() <= 1 or name.endswith("bias") or "norm" in type(module).__name__.lower()
    }


def _own_parameters(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for own, parameter in module.named_parameters(recurse=False):
        yield (f"{name}.{own}" if name else own), parameter

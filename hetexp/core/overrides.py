"""Checks what a person typed before Hydra composes it, so that every mistake is told at once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig
from omegaconf._utils import split_key

from hetexp.core.errors import did_you_mean, must_be

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override


class Overrides:
    """The overrides of a command line, sorted into usable ones and problems.

    Args:
        loader: Hydra's loader of the application's configuration.
        config_name: the primary configuration.
        typed: the overrides as typed.
        sweep: whether `--multirun` was given, so that a value may be a list of choices.
    """

    def __init__(self, loader: ConfigLoader, config_name: str, typed: Sequence[str], sweep: bool) -> None:
        self._loader, self._config_name, self._sweep = loader, config_name, sweep
        self.problems: list[str] = []
        self._groups: list[str] = []
        values: list[Override] = []
        for text in typed:
            override = self._parse(text)
            if override is None or not self._check_choices(override):
                continue
            key = str(override.key_or_group)
            if override.is_sweep_override() and not sweep:
                self.problems.append(
                    f"`{key}` must be one value without --multirun, but is '{text.partition('=')[2]}' "
                    f"instead. A list is written '{key}=[…]', a sweep needs -m."
                )
            elif self._loader.get_group_options(key):
                self._groups.append(text)
            else:
                values.append(override)
        self._plain: Any = None
        self._values: list[Override] = []
        for override in values:
            if self._check_key(override):
                self._values.append(override)

    def compose(self) -> Any:
        """Return the configuration of all usable overrides, a sweep's first choices, as an OmegaConf object.

        Raises:
            hydra.errors.HydraException: what is left cannot be composed.
        """
        return self._load([str(override.input_line) for override in self._values])

    def _load(self, values: list[str]) -> Any:
        """Compose the chosen groups and these values; a sweep is left out, any of its choices would do."""
        usable = [text for text in (*self._groups, *values) if not self._is_sweep(text)]
        return self._loader.load_configuration(self._config_name, usable, run_mode=RunMode.RUN)

    def _is_sweep(self, text: str) -> bool:
        override = self._parse(text)
        return override is None or override.is_sweep_override()

    def _parse(self, text: str) -> Override | None:
        try:
            return OverridesParser.create().parse_override(text)
        except HydraException as error:
            key, _, value = text.partition("=")
            if "=" in value:
                reason = f"A value with `=` in it needs quotes that reach Hydra: '{key}=\"{value}\"'."
            else:
                reason = str(error.__cause__ or error).partition("\n")[0]
            self.problems.append(
                f"`{key}` must be given as key=value that Hydra can read, but is '{text}' instead. {reason}"
            )
            return None

    def _check_choices(self, override: Override) -> bool:
        """Whether a group's option exists; an override that is of no group passes."""
        group = str(override.key_or_group)
        options = self._loader.get_group_options(group)
        if (
            not options
            or override.is_delete()
            or override.value_type is ValueType.GLOB_CHOICE_SWEEP
            or group.startswith("hydra")
        ):
            return True
        chosen = _choices(override)
        wrong = [choice for choice in chosen if choice is not None and choice not in options]
        for choice in wrong:
            self.problems.append(
                must_be(
                    group, "one of " + ", ".join(options), choice, did_you_mean(str(choice), options).strip()
                )
            )
        return not wrong

    def _check_key(self, override: Override) -> bool:
        """Whether a key exists in what the groups compose, or in what the words before it add."""
        key = str(override.key_or_group)
        if override.is_add() or override.is_force_add() or override.is_delete() or key.startswith("hydra"):
            return True
        try:
            self._plain = self._load([]) if self._plain is None else self._plain
        except HydraException:  # `compose` will say what is wrong with the groups
            return True
        unknown, known = _walk(self._plain, key)
        if unknown is not None and self._values:
            with contextlib.suppress(HydraException):
                unknown, known = _walk(self.compose(), key)
        if unknown is None:
            return True
        self.problems.append(
            f"`{key}` is not a key of the configuration (its value is {override.get_value_string()})."
            + did_you_mean(unknown, known)
        )
        return False


def _walk(node: Any, key: str) -> tuple[str | None, list[str]]:
    """Return the first part of a key that does not exist, and what exists beside it."""
    for part in split_key(key):
        if isinstance(node, ListConfig) and part.isdigit() and int(part) < len(node):
            node = node._get_node(int(part))
        elif isinstance(node, DictConfig) and part in node.keys():  # noqa: SIM118 - `in` hides missing values
            node = node._get_node(part)
        else:
            return part, [str(k) for k in node] if isinstance(node, DictConfig) else []
    return None, []


def _choices(override: Override) -> list[Any]:
    if override.is_choice_sweep():
        return list(override.sweep_string_iterator())
    value = override.value()
    return list(value) if isinstance(value, list) else [value]

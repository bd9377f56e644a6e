"""Checks what the user typed before Hydra composes it, so that every mistake is reported at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import split_key
from omegaconf.errors import OmegaConfBaseException

from hetexp.core.compose.conf_folders import own_conf_dirs
from hetexp.core.compose.loader import Missing, config_loader, find_missing, without_hydra
from hetexp.core.compose.words import KEY_OF, end_of_word, why_apart, why_unreadable
from hetexp.core.errors import did_you_mean, must_be
from hetexp.core.files import folder_problem
from hetexp.core.sweep.folder import name_problem

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

_LISTS = ("experiment",)
"""Groups of which several options may be chosen at once: each lies over the one before."""
_FORMS = {
    "hardware.devices": ", a list as [cuda:0,cpu]",
    "hardware.gpu_ids": ", card numbers as [0,1] or recommend:2 for the two best",
    "cluster.hosts": ", a list with an entry for each machine",
}
"""Keys whose values have another form than in other trainers."""


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
        for text in self._without_pieces(typed):
            override = self._parse(text)
            if override is None or not self._check_choices(override):
                continue
            key = str(override.key_or_group)
            if override.is_sweep_override() and not sweep:
                self.problems.append(
                    f"`{key}` must be one value without --multirun, but is '{text.partition('=')[2]}' "
                    f"instead. A list is written '{key}=[…]', a sweep needs -m."
                )
            elif key == "sweep.name" and override.is_sweep_override():
                self.problems.append(
                    must_be(key, "one name: it is that of the whole sweep", text.partition("=")[2])
                )
            elif self._loader.get_group_options(key):
                self._groups.append(text)
            else:
                values.append(override)
        self._check_hardware()
        self._plain: Any = None
        self._loaded: dict[tuple[str, ...], Any] = {}
        self._values: list[Override] = values if self._composes(values) else []
        signs: dict[str, str] = {}
        for override in () if self._values else _classes_first(values):
            checked = self._check_key(override)
            if checked is not None:
                self._values.append(checked)
                signs[str(override.input_line)] = str(checked.input_line)
        self.words = [signs.get(word, word) for word in typed]
        """The words for Hydra, which asks for a sign before an argument that no option has."""
        if sweep and not self.problems:
            with contextlib.suppress(HydraException):
                self.compose()

    def compose(self) -> Any:
        """Return the configuration of all usable overrides as an OmegaConf object.

        What is swept keeps its default, in which Hydra looks for the other keys, too.

        An unusable name of a sweep or folder for results is added to the problems: Hydra itself would stop.

        Raises:
            hydra.errors.HydraException: what is left cannot be composed.
        """
        composed = self._load([str(override.input_line) for override in self._values])
        found = []
        with contextlib.suppress(OmegaConfBaseException):  # an unresolved value is reported elsewhere
            # A job would report the name too late, in a folder of that name.
            name = OmegaConf.select(composed, "sweep.name") if self._sweep else None
            problem = name_problem(str(name) if type(name) is int else name) if name is not None else ""
            found += [must_be("sweep.name", problem, name)] if problem else []
        with contextlib.suppress(OmegaConfBaseException):
            key = "hydra.sweep.dir" if self._sweep else "hydra.run.dir"
            folder = OmegaConf.select(composed, key, throw_on_missing=True)
            problem = folder_problem(Path(folder)) if isinstance(folder, str) else ""
            found += [must_be(key, "a folder that can be written", folder, problem)] if problem else []
        self.problems += [problem for problem in found if problem not in self.problems]
        return composed

    def _composes(self, values: list[Override]) -> bool:
        """Return whether Hydra accepts all values; as it refuses unknown keys, there are none then."""
        if self.problems or any(override.is_sweep_override() for override in values):
            return False
        with contextlib.suppress(HydraException):
            self._load([str(override.input_line) for override in values])
            return True
        return False

    def _load(self, values: list[str]) -> Any:
        """Compose the chosen groups and these values; a sweep is left out, any of its choices would do."""
        usable = tuple(text for text in (*self._groups, *values) if not self._is_sweep(text))
        if usable not in self._loaded:
            self._loaded[usable] = self._compose(list(usable))
        return self._loaded[usable]

    def _compose(self, usable: list[str]) -> Any:
        return self._loader.load_configuration(self._config_name, usable, run_mode=RunMode.RUN)

    def _is_sweep(self, text: str) -> bool:
        override = self._parse(text)
        return override is None or override.is_sweep_override()

    def _without_pieces(self, typed: Sequence[str]) -> Iterator[str]:
        """Yield the whole words, and report each word that the shell cut at a space once."""
        words = list(typed)
        while words:
            end = end_of_word(words)
            whole, rest = " ".join(words[:end]), words[end:]
            if end == 1:
                yield whole
            else:
                self._refuse(whole, why_apart(whole))
            words = rest

    def _refuse(self, text: str, reason: str) -> None:
        key = text.partition("=" if "=" in text else " ")[0].strip() or text
        self.problems.append(
            f"`{key}` must be given as key=value that Hydra can read, but is '{text}' instead. {reason}"
        )

    def _parse(self, text: str) -> Override | None:
        if not text.startswith("="):  # Hydra takes it for an override of the primary configuration
            with contextlib.suppress(HydraException):
                return OverridesParser.create().parse_override(text)
        self._refuse(text, why_unreadable(text))
        return None

    def _check_choices(self, override: Override) -> bool:
        """Return whether a group's option exists; an override of no group passes."""
        group = str(override.key_or_group)
        options = self._loader.get_group_options(group)
        if (
            not options
            or override.is_delete()
            or override.value_type is ValueType.GLOB_CHOICE_SWEEP
            or group.startswith("hydra")
        ):
            return True
        accepted = "one of " + ", ".join(options)
        if isinstance(override.value(), list) and group not in _LISTS:
            self.problems.append(must_be(group, f"{accepted}, not a list", override.value()))
            return False
        wrong = [choice for choice in _choices(override) if choice not in options]
        for choice in wrong:
            fix = did_you_mean(str(choice), options).strip() or _own_option(group, str(choice))
            self.problems.append(must_be(group, accepted, choice, fix))
        return not wrong

    def _check_hardware(self) -> None:
        """Refuse two mixes: Hydra would take the last one, but the user may mean both."""
        mixes = [text.partition("=")[2] for text in self._groups if text.startswith("hardware=")]
        if len(set(mixes)) > 1:
            self.problems.append(
                f"`hardware` must be chosen once, but is chosen as {' and '.join(mixes)}. Devices of your "
                "own choice are written hardware.devices=[…]."
            )

    def _check_key(self, override: Override) -> Override | None:
        """Return an override whose key exists in what the groups compose, or in what the words before it add.

        An argument of the class that `_target_` names gets the sign of a new key. `None`: there is no such
        key.
        """
        key = str(override.key_or_group)
        if override.is_add() or override.is_force_add() or override.is_delete() or key.startswith("hydra"):
            return override
        try:
            self._plain = self._load([]) if self._plain is None else self._plain
        except HydraException:  # `compose` will say what is wrong with the groups
            return override
        missing = chosen = find_missing(self._plain, key)
        if missing is not None and self._values:
            with contextlib.suppress(HydraException):
                missing = find_missing(self.compose(), key)
        if missing is None:
            return override
        owner = "a key of the configuration"
        # The class of an option need not be imported, which takes seconds, if its keys say enough.
        is_chosen = chosen is not None and missing.target == chosen.target and _is_shipped(missing.target)
        hint = self._hint(key, missing) if is_chosen or missing.target is None else ""
        if not hint and missing.target is not None:
            owner = f"an argument of {missing.target}"
            names, takes_any = _arguments(missing.target, key)
            hint = did_you_mean(missing.name, names)
            if missing.name in names or (takes_any and not hint):
                return OverridesParser.create().parse_override(f"++{override.input_line}")
            hint = hint or f" It takes {', '.join(names) or 'no arguments'}."
        value = override.get_value_string()
        self.problems.append(f"`{key}` is not {owner} (its value is {value}).{hint}")
        return None

    def _hint(self, key: str, missing: Missing) -> str:
        """Return a sentence on the key that the user may mean, or an empty string."""
        hint = self._where(key) or _of_other_trainers(missing.name)
        hint = hint or did_you_mean(missing.name, missing.beside)
        return hint or (self._elsewhere(missing.name) if missing.target is None else "")

    def _where(self, key: str) -> str:
        """Suggest the key with dots, or other options of its group that have it."""
        with_dots = key.replace("/", ".")
        if key != with_dots and find_missing(self._plain, with_dots) is None:
            return f" Did you mean `{with_dots}`?"
        group = split_key(key)[0]
        having = []
        for option in self._loader.get_group_options(group):
            chosen = [text for text in self._groups if not text.startswith(f"{group}=")]
            with contextlib.suppress(HydraException):
                composed = self._compose([*chosen, f"{group}={option}"])
                if find_missing(composed, key) is None:
                    having.append(f"{group}={option}")
        if not having:
            return ""
        hint = f" It is one with {' or '.join(having)}"
        if any(self._is_sweep(text) and text.startswith(f"{group}=") for text in self._groups):
            return f"{hint}, but Hydra looks for it where `{group}` is not swept: write ++{key}=…"
        return f"{hint}."

    def _elsewhere(self, name: str) -> str:
        """Suggest a key of another section with this name, or a name like it."""
        keys = {key.rpartition(".")[2]: key for key in reversed(_dotted_keys(self._plain))}
        found = did_you_mean(name, keys)
        return f" Did you mean `{keys[found.split('`')[1]]}`?" if found else ""


def compose_typed(
    typed: Sequence[str],
    multirun: bool = False,
    config_dir: str | None = None,
    config_path: str | None = None,
    config_name: str = "config",
) -> tuple[DictConfig | None, list[str]]:
    """Compose what the user typed, and find every mistake in its words.

    Args:
        typed: a list gets, in place, the signs that Hydra asks for before arguments of a class.
        config_dir: the user's own folder, before the shipped one.

    Returns:
        The configuration of all words that could be read, and one sentence for each mistake. It is `None`
        for a sweep, which has several, and if nothing can be composed.
    """
    try:
        with config_loader(config_dir, config_path, config_name) as (loader, name):
            overrides = Overrides(loader, name, typed, multirun)
            if isinstance(typed, list):
                typed[:] = overrides.words
            if multirun and not overrides.problems:
                return None, []
            # The values that could be read are checked too: one round of mending instead of two.
            try:
                composed = overrides.compose()
            except HydraException as error:
                return None, [*overrides.problems, str(error)]
            return without_hydra(composed), overrides.problems
    except HydraException as error:
        return None, [str(error)]


def _dotted_keys(node: Any, prefix: str = "") -> list[str]:
    """Return all keys below a node but Hydra's own."""
    keys = []
    for name in node:
        key = f"{prefix}{name}"
        if key != "hydra":
            keys.append(key)
            inner = node._get_node(name)
            if isinstance(inner, DictConfig) and not inner._is_none():
                keys += _dotted_keys(inner, f"{key}.")
    return keys


def _classes_first(overrides: Sequence[Override]) -> list[Override]:
    """Return the overrides with those of `_target_` before the arguments of the class."""
    return sorted(overrides, key=lambda override: not str(override.key_or_group).endswith("._target_"))


def _is_shipped(target: str | None) -> bool:
    """Return whether a class is that of a shipped option; an option of the user may lack its arguments."""
    return f"{target}".startswith(("hetexp.", "torch.optim.")) and not own_conf_dirs(Path.cwd())


def _arguments(target: str, key: str) -> tuple[list[str], bool]:
    from hetexp.core.instantiate import arguments  # what completion does not need, and slow to import

    return arguments(target, key)


def _own_option(group: str, name: str) -> str:
    """Say how a class of the user's own becomes an option of a group; empty if a group has no class."""
    from hetexp.core.config import COMPONENTS

    if group not in COMPONENTS or not name.isidentifier():
        return ""
    custom = f"{group}=custom " if group in ("model", "data") else ""
    return (
        f"For a class of your own write {custom}{group}._target_=PACKAGE.CLASS, or describe it in "
        f"conf/{group}/{name}.yaml."
    )


def _of_other_trainers(name: str) -> str:
    key = KEY_OF.get(name.casefold())
    return f" Did you mean `{key}`{_FORMS.get(key, '')}?" if key is not None else ""


def _choices(override: Override) -> list[Any]:
    if override.is_choice_sweep():
        return list(override.sweep_string_iterator())
    value = override.value()
    return list(value) if isinstance(value, list) else [value]

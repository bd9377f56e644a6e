"""Checks what the user typed before Hydra composes it, so that every mistake is reported at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf._utils import split_key
from omegaconf.errors import OmegaConfBaseException

from hetexp.core.compose.conf_folders import conf_dir, not_utf8, own_conf_dirs
from hetexp.core.compose.words import end_of_word, why_unreadable, without_spaces
from hetexp.core.errors import did_you_mean, must_be
from hetexp.core.files import folder_problem
from hetexp.core.sweep.folder import name_problem

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

_LISTS = ("experiment",)
"""Groups of which several options may be chosen at once: each lies over the one before."""
_ELSEWHERE = {
    "batch_size": "trainer.global_batch_size",
    "per_device_batch_size": "trainer.batch_size_per_device",
    "learning_rate": "optimizer.lr",
    "gpus": "hardware.gpu_ids",
    "num_epochs": "trainer.max_epochs",
}
"""Words of other frameworks, and our keys."""


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
        for override in values if not self._values else ():
            if self._check_key(override):
                self._values.append(override)
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
                self._refuse(whole, f"The shell cuts words at spaces: type '{without_spaces(whole)}'.")
            words = rest

    def _refuse(self, text: str, reason: str) -> None:
        key = text.partition("=")[0].strip() or text
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
            fix = did_you_mean(str(choice), options).strip()
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

    def _check_key(self, override: Override) -> bool:
        """Return whether a key exists in what the groups compose, or in what the words before it add."""
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
            + (self._where(key) or did_you_mean(unknown, known) or self._elsewhere(unknown))
        )
        return False

    def _where(self, key: str) -> str:
        """Suggest the key with dots, or other options of its group that have it."""
        with_dots = key.replace("/", ".")
        if key != with_dots and _walk(self._plain, with_dots)[0] is None:
            return f" Did you mean `{with_dots}`?"
        group = split_key(key)[0]
        having = []
        for option in self._loader.get_group_options(group):
            chosen = [text for text in self._groups if not text.startswith(f"{group}=")]
            with contextlib.suppress(HydraException):
                composed = self._compose([*chosen, f"{group}={option}"])
                if _walk(composed, key)[0] is None:
                    having.append(f"{group}={option}")
        if not having:
            return ""
        hint = f" It is one with {' or '.join(having)}"
        if any(self._is_sweep(text) and text.startswith(f"{group}=") for text in self._groups):
            return f"{hint}, but Hydra looks for it where `{group}` is not swept: write ++{key}=…"
        return f"{hint}."

    def _elsewhere(self, name: str) -> str:
        """Suggest a key of another section with this name, or a name like it."""
        keys = {key.rpartition(".")[2]: key for key in reversed(_dotted_keys(self._plain))} | _ELSEWHERE
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
        config_dir: the user's own folder, before the shipped one.

    Returns:
        The configuration of all words that could be read, and one sentence for each mistake. It is `None`
        for a sweep, which has several, and if nothing can be composed.
    """
    try:
        with config_loader(config_dir, config_path, config_name) as (loader, name):
            overrides = Overrides(loader, name, typed, multirun)
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


def without_hydra(composed: Any) -> DictConfig:
    """Return a composed configuration without what is Hydra's own, and `without_idle_arguments`."""
    hydra = composed.hydra
    without_idle_arguments(composed, hydra.runtime.choices, [str(word) for word in hydra.overrides.task])
    return OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])


def without_idle_arguments(cfg: Any, choices: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Remove from `cfg` the arguments of a shipped option's class if another `_target_` does not take them.

    `optimizer._target_=torch.optim.RMSprop` leaves the arguments of AdamW behind. A typed value, and a value
    of the user's own files, stay to be refused.

    Args:
        cfg: the composed configuration, with or without Hydra's own part.
        choices: the option of each group.
        typed: the overrides.
    """
    # Completion checks no values, and what does is slow to import.
    from hetexp.core.config import COMPONENTS
    from hetexp.core.instantiate import accepts, fits_default

    keys = {word.lstrip("+~").partition("=")[0] for word in typed}
    for section in COMPONENTS:
        node = cfg.get(section)
        target = node._get_node("_target_") if isinstance(node, DictConfig) else None
        given = None if target is None or target._is_interpolation() else target._value()
        file = Path(section, f"{choices.get(section)}.yaml")
        if not isinstance(given, str) or given in _text(conf_dir() / file).split():
            continue  # as nearly always, and without parsing
        shipped = _shipped_option(file)
        if shipped.get("_target_", given) == given:
            continue
        values: Any = OmegaConf.to_container(node, resolve=False)
        with open_dict(node):
            for name, value in shipped.items():
                key = f"{section}.{name}"
                is_typed = any(word == key or word.startswith((f"{key}.", f"{key}[")) for word in keys)
                is_shipped = name in values and values[name] == value and not is_typed
                if is_shipped and not (accepts(given, name) and fits_default(given, name, value)):
                    del node[name]


def _shipped_option(file: Path) -> dict[str, Any]:
    """Return the keys of a shipped option; none if a file of the user takes its place.

    Args:
        file: `<group>/<option>.yaml`.
    """
    text = _text(conf_dir() / file)
    if not text or any((folder / file).is_file() for folder in own_conf_dirs(Path.cwd())):
        return {}
    plain: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    found: dict[str, Any] = {}
    for name in plain.pop("defaults", ()):
        if isinstance(name, str) and name != "_self_":
            found |= _shipped_option(file.with_name(f"{name}.yaml"))
    found |= plain
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@contextlib.contextmanager
def config_loader(
    config_dir: str | None = None, config_path: str | None = None, config_name: str = "config"
) -> Iterator[tuple[ConfigLoader, str]]:
    """Give Hydra's loader of the application's configuration, and its name, and clear Hydra's state after.

    Args:
        config_dir: the user's own folder, before the shipped one.

    Raises:
        hydra.errors.HydraException: a file of the user's is no UTF-8; names it.
    """
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    search_path = create_config_search_path(str(config_path or conf_dir()))
    if config_dir is not None:
        folder = Path(config_dir).absolute()
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    try:
        yield Hydra.create_main_hydra2("hetexp", search_path).config_loader, config_name
    except UnicodeDecodeError as error:
        folders = [Path(folder) for folder in (config_dir, config_path) if folder is not None]
        raise HydraException(not_utf8([*folders, *own_conf_dirs(Path.cwd())]) or str(error)) from error
    finally:
        GlobalHydra.instance().clear()


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

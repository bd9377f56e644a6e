"""Hydra's loader of the application's configuration, and the keys and classes in what it composes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf._utils import split_key

from hetexp.core.compose.conf_folders import conf_dir, not_utf8, own_conf_dirs

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader


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


@dataclass(frozen=True)
class Missing:
    """The first part of a key that does not exist."""

    name: str
    beside: list[str]
    """What exists beside it."""
    target: str | None
    """The class that it would be an argument of."""


def find_missing(node: Any, key: str) -> Missing | None:
    """Return the first part of a key that does not exist, `None` if all do."""
    for part in split_key(key):
        if isinstance(node, ListConfig) and part.isdigit() and int(part) < len(node):
            node = node._get_node(int(part))
        elif isinstance(node, DictConfig) and part in node.keys():  # noqa: SIM118 - `in` hides missing values
            node = node._get_node(part)
        else:
            names = [str(name) for name in node] if isinstance(node, DictConfig) else []
            beside = [name for name in names if not name.startswith("_")]
            target = node._get_node("_target_") if "_target_" in names else None
            known = None if target is None or target._is_interpolation() else target._value()
            return Missing(part, beside, known if isinstance(known, str) and known != "???" else None)
    return None


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

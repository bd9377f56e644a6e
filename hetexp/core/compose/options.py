"""The options of a configuration group, shipped and the user's own, composed."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader


def group_options(
    group: str, config_name: str = "config", only: Collection[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Return what each option of a group composes to, by its name; missing values are `???`.

    Args:
        group: `balancing`, `strategy`, …
        config_name: the primary configuration that the options are composed in.
        only: names of the wanted ones; `None`: all.

    Raises:
        ConfigError: an option cannot be composed.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

    from hetexp.core.compose.conf_folders import conf_dir
    from hetexp.core.config import own_arguments
    from hetexp.core.errors import ConfigError

    # A run that Hydra started has its own Hydra, which is put back.
    own, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    found = {}
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"), warnings.catch_warnings():
            # Of `_self_`, which only a primary configuration needs in its defaults.
            warnings.filterwarnings("ignore", "In '.*': Defaults list is missing", UserWarning)
            loader = GlobalHydra.instance().config_loader()
            for name in loader.get_group_options(group):
                if only is not None and name not in only:
                    continue
                try:
                    try:  # by itself, which takes much less time
                        node = _written(loader, group, name)
                        if node is None:
                            node = compose(f"{group}/{name}")[group]
                        plain = OmegaConf.to_container(node, resolve=True)
                    except InterpolationResolutionError:  # it refers to another section
                        node = compose(config_name, [f"{group}={name}"])[group]
                        plain = OmegaConf.to_container(node, resolve=True)
                except (HydraException, OmegaConfBaseException) as error:
                    reason = " ".join(f"{error}".split())
                    raise ConfigError(
                        f"`{group}={name}` must be an option that composes, but: {reason}"
                    ) from error
                assert isinstance(plain, dict)
                found[name] = own_arguments(group, {str(key): value for key, value in plain.items()})
    finally:
        GlobalHydra.instance().hydra = own
    return found


def _written(loader: ConfigLoader, group: str, name: str) -> Any:
    """Return an option as its file has it; `None` if it may compose to more than its file.

    Hydra would also compose its own configuration, of some twenty files.
    """
    from omegaconf import DictConfig, OmegaConf

    path = f"{group}/{name}"
    source = next(source for source in loader.get_sources() if source.is_config(path))
    found = source.load_config(path)
    whole = isinstance(found.config, DictConfig) and "defaults" not in found.config
    if not whole or found.header["package"] is not None or source.scheme() == "structured":
        return None
    return OmegaConf.create({group: found.config})[group]

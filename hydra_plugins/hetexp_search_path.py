"""Lets Hydra find a person's own `conf/`. Hydra imports all of `hydra_plugins` in every application."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hetexp.core.compose.conf_folders import conf_dir, own_conf_dirs


class HetexpSearchPath(SearchPathPlugin):
    """Puts a person's own folders before the shipped one: the first folder that has an option gives it.

    So one's own options add to the shipped ones and win over those of the same name. Other Hydra applications
    of the same environment are left alone: only where hetexp's configuration is the main one does this act.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        shipped = str(conf_dir())
        if not any(one.provider == "main" and one.path == shipped for one in search_path.get_path()):
            return
        for folder in own_conf_dirs(Path.cwd()):
            search_path.prepend("hetexp-own", f"file://{folder}", SearchPathQuery("main", shipped))

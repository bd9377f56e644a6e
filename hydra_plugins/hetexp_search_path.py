"""Lets Hydra find the user's own `conf/`. Hydra imports all of `hydra_plugins` in every application."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hetexp.core.compose.conf_folders import conf_dir, ignore_byte_order_marks, own_conf_dirs


class HetexpSearchPath(SearchPathPlugin):
    """Puts the user's own folders before the shipped one, so that their options win over those of its name.

    It changes only applications whose main configuration is hetexp's.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        ignore_byte_order_marks()
        shipped = str(conf_dir())
        if not any(part.provider == "main" and part.path == shipped for part in search_path.get_path()):
            return
        for folder in own_conf_dirs(Path.cwd()):
            search_path.prepend("hetexp-own", f"file://{folder}", SearchPathQuery("main", shipped))

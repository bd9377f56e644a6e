"""Folders of configuration: the shipped one, and the user's own beside the project."""

from __future__ import annotations

from pathlib import Path

import hetexp

_named: Path | None = None


def conf_dir() -> Path:
    """Return the folder of the shipped configuration: inside an installed package, beside it in a clone."""
    package = Path(hetexp.__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def own_conf_dirs(working_dir: Path) -> list[Path]:
    """Return the user's own folders, the first of which wins: the one of `--config-dir`, then `conf`."""
    folders = [] if _named is None else [_named]
    folders.append(working_dir / "conf")
    shipped = conf_dir().resolve()
    return [folder for folder in folders if folder.is_dir() and folder.resolve() != shipped]


def name_own_conf_dir(folder: Path | None) -> None:
    """Set the folder of `--config-dir`: Hydra itself searches it last, so that it could not override."""
    global _named
    _named = folder.absolute() if folder is not None else None

"""Folders of configuration: the shipped one, and the user's own beside the project."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
    """Set the folder of `--config-dir`, and let Python import modules from it and from the folder around it.

    Hydra itself would search it last, so that it could not override.
    """
    global _named
    _named = folder.absolute() if folder is not None else None
    sys.path += [path for path in _module_dirs() if path not in sys.path]


def import_paths(working_dir: Path) -> tuple[str, ...]:
    """Return the folders from which every rank imports the user's own modules, the first of which wins."""
    folders = [str(working_dir.absolute()), str(Path(sys.path[0]).absolute()), *_module_dirs()]
    return tuple(dict.fromkeys(folders))


def not_utf8(folders: Sequence[Path]) -> str:
    """Return a sentence for each YAML file that is no UTF-8, which Hydra reads without naming the file."""
    problems = []
    for path in dict.fromkeys(path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        try:
            path.read_text(encoding="utf-8")
        except OSError:
            continue
        except UnicodeDecodeError as error:
            line = path.read_bytes()[: error.start].count(b"\n") + 1
            problems.append(f"`{path}` must be UTF-8, but line {line} is not. Save the file as UTF-8.")
    return "\n".join(problems)


def ignore_byte_order_marks() -> None:
    """Let Hydra read `# @package …` in a file with a byte-order mark, which the YAML reader skips."""
    from hydra.plugins.config_source import ConfigSource

    read = ConfigSource._get_header_dict
    if read.__module__ == __name__:
        return

    def header(text: str) -> dict[str, str | None]:
        return read(text.removeprefix("\ufeff"))

    ConfigSource._get_header_dict = staticmethod(header)  # type: ignore[assignment]


def _module_dirs() -> list[str]:
    return [str(_named), str(_named.parent)] if _named is not None else []

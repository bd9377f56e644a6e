"""Hashes of the source files of a configuration's classes, so that an edited model counts as another model.

The files are found by name and read, without importing them.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_INSTALLED = {"site-packages", "dist-packages"}


def source_hashes(sections: Iterable[Any], import_paths: Sequence[str]) -> dict[str, str]:
    """Return module → hash of its file, for every class or function that the sections name.

    The user's own modules (below `import_paths`) that these modules import count as well. Installed packages
    and names without a file are left out.

    Args:
        sections: plain values; every text in them that is a dotted path is looked up.
        import_paths: folders of the user's own modules, besides `sys.path`.
    """
    hashes: dict[str, str] = {}
    names = [part for path in _dotted_paths(list(sections)) for part in _prefixes(path)]
    seen = set(names)
    while names:
        name = names.pop()
        spec = _find(name, import_paths)
        path = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
        if path is None or path.suffix != ".py" or _INSTALLED & set(path.parts):
            continue
        try:
            text = path.read_bytes()
        except OSError:
            continue
        hashes[name] = hashlib.sha256(text).hexdigest()[:16]
        if _is_own(name, path, import_paths):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            new = {part for other in _imported(text, package) for part in _prefixes(other)} - seen
            seen |= new
            names += sorted(new)
    return dict(sorted(hashes.items()))


def _dotted_paths(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _dotted_paths(item)
    elif isinstance(value, str) and _DOTTED.fullmatch(value):
        yield value


def _prefixes(path: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c`, any of which may be a module."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _find(name: str, import_paths: Sequence[str]) -> ModuleSpec | None:
    """Find a module without importing its packages, unlike `importlib.util.find_spec`."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, list(import_paths))
    except (ImportError, ValueError):  # a module that code has made
        return None
    for count in range(len(rest)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = ".".join([top, *rest[: count + 1]])
        spec = PathFinder.find_spec(full, list(spec.submodule_search_locations))
    return spec


def _is_own(name: str, path: Path, import_paths: Sequence[str]) -> bool:
    return name.partition(".")[0] != "hetexp" and any(path.is_relative_to(folder) for folder in import_paths)


def _imported(text: bytes, package: str) -> Iterator[str]:
    """Yield the dotted paths that a module's text imports, names in modules included."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                module = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # beyond the top
                continue
            yield from (f"{module}.{alias.name}" for alias in node.names)

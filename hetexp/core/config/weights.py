"""`model.weights` and `model.weights_strict`: the file that a model's first weights come from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hetexp.core.errors import must_be

WEIGHTS, STRICT = "weights", "weights_strict"


def without_weights(node: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return the arguments of the model's class.

    Args:
        named: arguments that the class names in its signature: it gets them itself.
    """
    return {name: value for name, value in node.items() if name not in (WEIGHTS, STRICT) or name in named}


def first_weights(node: Mapping[str, Any], named: Collection[str]) -> tuple[str | None, bool]:
    """Return the path of the first weights, `None` without one, and whether they must be complete."""
    path = None if WEIGHTS in named else node.get(WEIGHTS)
    return path, bool(node.get(STRICT, True))


def weights_problems(node: Mapping[str, Any], named: Collection[str]) -> list[str]:
    """Return what is wrong with the two keys, one sentence each."""
    problems = []
    path = None if WEIGHTS in named else node.get(WEIGHTS)
    strict = None if STRICT in named else node.get(STRICT)
    if path is not None and not (isinstance(path, str) and Path(path).expanduser().exists()):
        problems.append(must_be(f"model.{WEIGHTS}", "an existing file or folder", path))
    if strict is not None and not isinstance(strict, bool):
        problems.append(must_be(f"model.{STRICT}", "true or false", strict))
    if path is None and strict is False and WEIGHTS not in named:
        problems.append(must_be(f"model.{STRICT}", f"left out where `model.{WEIGHTS}` is", strict))
    return problems

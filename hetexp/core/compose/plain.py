"""A composed configuration as plain types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

JUDGED_WITH_TORCH = (
    *("model.", "optimizer.", "loss.", "trainer.loss", "trainer.schedule"),
    *("hardware.", "cluster.", "resume"),
)
"""Beginnings of keys whose values may be refused by a class or a driver that needs torch."""


def plain(cfg: DictConfig) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the configuration as plain types, its missing keys, and the problems with its values.

    A missing value, and a value that cannot be resolved, is null in the result.
    """
    cfg = cfg.copy()
    missing = sorted(_missing(cfg))
    problems = [f"`{key}` must be given, but is ??? (missing)." for key in missing]
    for key in missing:
        OmegaConf.update(cfg, key, None)
    while True:
        try:
            raw = OmegaConf.to_container(cfg, resolve=True)
            break
        except OmegaConfBaseException as error:
            if error.full_key is None or error.full_key in missing:
                raise
            first_line = str(error).partition("\n")[0]
            problems.append(
                f"`{error.full_key}` must be a value that can be resolved, but is not: {first_line}."
            )
            missing.append(error.full_key)
            OmegaConf.update(cfg, error.full_key, None)
    # Through JSON, so that the checked values are exactly those of the plan.
    plain_types: dict[str, Any] = json.loads(json.dumps(raw))
    return plain_types, missing, problems


def _missing(node: Any, key: str = "") -> Iterator[str]:
    """Yield the keys whose value is ???, without resolving interpolations as OmegaConf does."""
    names: Sequence[Any] = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        child = node._get_node(name)
        path = f"{key}[{name!s}]" if isinstance(node, ListConfig) else f"{key}.{name!s}".lstrip(".")
        if child._is_missing():
            yield path
        elif isinstance(child, (DictConfig, ListConfig)) and not (
            child._is_interpolation() or child._is_none()
        ):
            yield from _missing(child, path)


def typed_for_torch(words: Sequence[str], problems: Sequence[str]) -> bool:
    """Return whether a typed value that has no problem so far can only be judged with torch."""
    keys = [word.lstrip("+~").partition("=")[0] for word in words]
    return any(
        key.startswith(JUDGED_WITH_TORCH) and not any(problem.startswith(f"`{key}") for problem in problems)
        for key in keys
    )

"""The configuration keys that a request may set, and the words that Hydra gets for them.

`allowed.json` lists the keys with types, limits and choices, which `scripts/describe_keys.py` takes from the
schema. No word of a request is read as Hydra's grammar. Values are numbers, switches, existing options, and
texts of few characters, which are written out here.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from hetexp.core.errors import did_you_mean, must_be
from hetexp.web.schemas import Key

T = TypeVar("T")
GROUPS = ("model", "data", "strategy", "balancing", "optimizer", "logger")
"""Groups whose options a request may choose; `experiment` is a separate field."""
MOST_ENTRIES = 64
"""Longest list."""
_READING = threading.RLock()
"""Hydra reads configuration in one thread at a time."""
_OPTION = re.compile(r"[A-Za-z0-9][\w.-]*")
_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.,:+()-]{0,79}")
_NOT_OFFERED = {"model": ("custom",), "data": ("custom",)}
"""Options that need the user's own class."""


class Allowed(Key):
    """One key that a request may set."""

    def problem(self, value: object) -> str | None:
        """Return the problem of a value, `None` if it is accepted."""
        if value is None and self.nullable:
            return None
        accepted = self._accepted()
        if self.kind in ("ints", "floats"):
            fits = isinstance(value, list) and 0 < len(value) <= MOST_ENTRIES and all(map(self._fits, value))
        else:
            fits = self._fits(value)
        if fits:
            return None
        fix = did_you_mean(value, self.choices).strip() if self.choices and isinstance(value, str) else ""
        return must_be(self.key, accepted, _short(value), fix)

    def _accepted(self) -> str:
        if self.choices is not None:
            words = "one of " + ", ".join(self.choices)
        elif self.kind == "bool":
            words = "true or false"
        elif self.kind == "text":
            words = (
                "at most 80 letters, digits, spaces and any of _ . , : + ( ) -, the first a letter or digit"
            )
        else:
            whole = "whole number" if self.kind in ("int", "ints") else "number"
            bounds = f"from {_number(self.minimum)} to {_number(self.maximum)}"
            words = f"a {whole} {bounds}"
            if self.kind in ("ints", "floats"):
                words = f"a list of 1 to {MOST_ENTRIES} {whole}s {bounds}"
        return words + (", or null" if self.nullable else "")

    def _fits(self, value: object) -> bool:
        if self.kind == "choice":
            return isinstance(value, str) and value in (self.choices or ())
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and _TEXT.fullmatch(value) is not None
        types = (int,) if self.kind in ("int", "ints") else (int, float)
        if not isinstance(value, types) or isinstance(value, bool):
            return False
        assert self.minimum is not None
        assert self.maximum is not None
        return self.minimum <= value <= self.maximum  # NaN is not


def _read_once(read: Callable[[], T]) -> Callable[[], T]:
    """Return a function that reads configuration at its first call only, in one thread at a time."""
    cached = cache(read)

    @wraps(read)
    def locked() -> T:
        with _READING:
            return cached()

    return locked


@_read_once
def options() -> dict[str, tuple[str, ...]]:
    """Return the options of each group that a request may choose, and the experiments that are no sweeps.

    Options of the user's own `conf/` are included.
    """
    from hetexp.app import register_resolvers
    from hetexp.core.compose.loader import config_loader
    from hetexp.core.sweep.grid import asks_to_sweep

    register_resolvers()
    result = {}
    with config_loader() as (loader, _):
        for group in (*GROUPS, "experiment"):
            names = [name for name in loader.get_group_options(group) if _OPTION.fullmatch(name)]
            result[group] = [name for name in names if name not in _NOT_OFFERED.get(group, ())]
    experiments = result["experiment"]
    result["experiment"] = [name for name in experiments if not asks_to_sweep([f"experiment={name}"])]
    return {group: tuple(names) for group, names in result.items()}


@_read_once
def allowed() -> dict[str, Allowed]:
    """Return all keys that a request may set."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    groups = [_group(name, f"Option of {name}") for name in GROUPS]
    return {key.key: key for key in (*groups, *map(Allowed.model_validate, rows))}


def _group(name: str, description: str, nullable: bool = False) -> Allowed:
    names = list(options()[name])
    return Allowed(key=name, kind="choice", description=description, choices=names, nullable=nullable)


@_read_once
def defaults() -> dict[str, Any]:
    """Return the default of each allowed key that the configuration has without overrides."""
    from omegaconf import OmegaConf

    from hetexp.core.compose.overrides import compose_typed

    composed, _ = compose_typed([])
    assert composed is not None
    values: dict[str, Any] = {
        "model": "convnet",
        "data": "digits",
        "strategy": "ddp",
        "balancing": "auto",
        "optimizer": "adamw",
    }
    for key in allowed():
        value = OmegaConf.select(composed, key) if key not in GROUPS else None
        if value is not None:
            values[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return values


def problems_of(overrides: Mapping[str, Any], experiment: str | None) -> list[tuple[str | None, str]]:
    """Return key and message of each wrong override of a request."""
    keys = allowed()
    problems: list[tuple[str | None, str]] = []
    if experiment is not None:
        problem = _group("experiment", "", nullable=True).problem(experiment)
        problems += [("experiment", problem)] if problem else []
    for key, value in overrides.items():
        if key not in keys:
            shown = _short(key)
            message = f"`{shown}` is not a key that a request may set.{did_you_mean(shown, keys)}"
            problems.append((shown, f"{message} GET /api/v1/options lists them."))
        else:
            problem = keys[key].problem(value)
            problems += [(key, problem)] if problem else []
    return problems


def words(overrides: Mapping[str, Any], experiment: str | None, devices: Sequence[str]) -> list[str]:
    """Return the words for `hetexp train`, for overrides without problems (`problems_of`).

    Args:
        devices: names for `hardware.devices`, which must exist.
    """
    groups = {key: overrides[key] for key in GROUPS if key in overrides}
    # An experiment's own cards would clash with the chosen devices.
    hardware = [f"hardware.devices=[{','.join(devices)}]", "hardware.cards=null"]
    return [*_requested(groups | dict(overrides), experiment), *hardware]


def named(overrides: Mapping[str, Any], experiment: str | None) -> str:
    """Return the name of a training whose request has no name: its overrides."""
    others = {key: value for key, value in overrides.items() if key != "name"}
    return ",".join(_requested(others, experiment)) or "as configured"


def _requested(overrides: Mapping[str, Any], experiment: str | None) -> list[str]:
    chosen = [f"experiment={experiment}"] if experiment is not None else []
    keys = allowed()
    return chosen + [f"{key}={_written(keys[key].kind, value)}" for key, value in overrides.items()]


def _written(kind: str, value: Any) -> str:
    """Return a value as Hydra reads it back."""
    if value is None:
        return "null"
    if kind in ("ints", "floats"):
        return "[" + ",".join(_written("int" if kind == "ints" else "float", entry) for entry in value) + "]"
    if (
        kind == "text"
    ):  # in quotes, so that `null` and `1` stay texts; it has no character that needs an escape
        return f"'{value}'"
    if kind == "bool":
        return "true" if value else "false"
    return repr(float(value)) if kind == "float" else str(value)


def _number(value: float | None) -> str:
    return f"{value:.10g}"


def _short(value: Any) -> Any:
    """Return a value, or its beginning if it is too long to show."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= 80 else f"{text[:77]}…"

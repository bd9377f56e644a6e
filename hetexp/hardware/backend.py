"""Finds backends by name: hetexp's own, and the user's that `hardware.backends` names.

A backend of your own is a subclass of `Backend` with a `name` and its vendor's `cards`. Its dotted path is
the `backend` of its devices: the plan carries it, so that each rank can import the class.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, must_be
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.backends.cuda import CudaBackend
from hetexp.hardware.backends.hip import HipBackend
from hetexp.hardware.backends.mps import MpsBackend
from hetexp.hardware.backends.xpu import XpuBackend
from hetexp.hardware.base import VISIBILITY, Backend, CardLostError, Counter, Gauge, StagePasses
from hetexp.hardware.emulation.altered import altered
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.hardware.emulation.ordered_faults import FaultyBackend

__all__ = [
    "ACCELERATORS",
    "BACKENDS",
    "VISIBILITY",
    "Backend",
    "CardLostError",
    "Counter",
    "Gauge",
    "StagePasses",
    "accelerators",
    "add_backends",
    "backend_class",
    "environment_together",
    "visible_places",
]

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (CpuBackend, CudaBackend, HipBackend, XpuBackend, MpsBackend, EmulatedBackend)
}
ACCELERATORS = ("cuda", "hip", "xpu", "mps")
"""Backends of hetexp for cards that a machine can have."""
_KEY = "hardware.backends"
_added: dict[str, type[Backend]] = {}
"""Dotted path → class, of the backends that this process added to its detection."""


def backend_class(name: str) -> type[FaultyBackend]:
    """Return the class of a backend by its name or dotted path, with ordered faults around it.

    Its vendor library is not imported yet.

    Raises:
        ConfigError: the path leads to no backend.
    """
    return altered(BACKENDS[name] if name in BACKENDS else _located(name, _KEY))


def accelerators() -> tuple[str, ...]:
    """Return the backends that detection asks for cards: hetexp's, then the user's by dotted path."""
    return (*ACCELERATORS, *_added)


def driver_is_loaded(name: str, exists: Callable[[str], bool] = os.path.exists) -> bool | None:
    """Return whether a driver of a backend's cards is loaded under Linux; `None` if that is not known.

    Args:
        exists: whether a file of the machine exists.
    """
    drivers = backend_class(name).drivers
    return any(map(exists, drivers)) if drivers else None


def add_backends(paths: Sequence[str], key: str = _KEY) -> list[str]:
    """Add the user's backends to detection in this process, and return the problems.

    Args:
        paths: dotted paths of their classes.
        key: Hydra key of the paths, for messages.
    """
    problems: list[str] = []
    for position, path in enumerate(paths):
        here = f"{key}[{position}]"
        try:
            backend = _located(path, here)
        except ConfigError as error:
            problems += error.problems
            continue
        owners = {other.name: place for place, other in {**BACKENDS, **_added}.items() if place != path}
        if backend.name in owners:
            free = f"a backend whose `name` is free (`{backend.name}` is that of {owners[backend.name]})"
            problems.append(must_be(here, free, path))
        else:
            _added[path] = backend
    return problems


def _located(path: str, key: str) -> type[Backend]:
    """Return the class of a backend by its dotted path.

    Raises:
        ConfigError: the path cannot be imported, or leads to no complete backend.
    """
    from hetexp.core.instantiate import locate  # it imports pydantic, which `hetexp gpus` does without

    accepted = "the dotted path of a subclass of hetexp.hardware.backend.Backend"
    try:
        located = locate(path, key)
    except ConfigError:
        raise
    except Exception as error:  # an import runs any code and so raises anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(must_be(key, accepted, path, f"It cannot be imported: {reason}.")) from error
    if not isinstance(located, type) or not issubclass(located, Backend):
        raise ConfigError(must_be(key, accepted, path))
    if missing := sorted(located.__abstractmethods__):
        raise ConfigError(must_be(key, f"{accepted} that defines {', '.join(missing)}", path))
    if not re.fullmatch("[a-z]+", getattr(located, "name", "")):
        raise ConfigError(must_be(key, f"{accepted} with a `name` of small letters", path))
    return located


def environment_together(specs: Sequence[DeviceSpec]) -> dict[str, str]:
    """Return the variables that make a process see all of these devices, which have one backend."""
    together: dict[str, list[str]] = {}
    for spec in specs:
        for key, value in backend_class(spec.backend).environment(spec).items():
            values = together.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: ",".join(values) for key, values in together.items()}


def visible_places(specs: Sequence[DeviceSpec]) -> list[int]:
    """Return the number of each device in a process that sees all of them."""
    masks = [backend_class(spec.backend).environment(spec) for spec in specs]
    distinct = [mask for place, mask in enumerate(masks) if mask not in masks[:place]]
    return [distinct.index(mask) for mask in masks]

"""Finds backends by name. What other packages and users import of them is here."""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.core.device import DeviceSpec
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


def backend_class(name: str) -> type[FaultyBackend]:
    """Return the class of a backend by its name, with ordered faults around it.

    Its vendor library is not imported yet.
    """
    return altered(BACKENDS[name])


def environment_together(specs: Sequence[DeviceSpec]) -> dict[str, str]:
    """Return the variables that make a process see all of these devices of one backend, each once."""
    together: dict[str, list[str]] = {}
    for spec in specs:
        for key, value in backend_class(spec.backend).environment(spec).items():
            values = together.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: ",".join(values) for key, values in together.items()}


def visible_places(specs: Sequence[DeviceSpec]) -> list[int]:
    """Return the number by which a process that sees all of these devices calls each of them."""
    masks = [backend_class(spec.backend).environment(spec) for spec in specs]
    distinct = [mask for place, mask in enumerate(masks) if mask not in masks[:place]]
    return [distinct.index(mask) for mask in masks]

"""Finds the users of a card: processes that compute on it, or another run of hetexp that holds its lease."""

from __future__ import annotations

import os
from collections.abc import Callable

from hetexp.core.device import GIB
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.lease import holder
from hetexp.hardware.detection.machine import Machine

DEFAULT_THRESHOLD_MIB = 256.0
UNSEEN_FRACTION = 0.25
"""Part of a card's memory above which processes that this one cannot see (another container's) count."""


def who_is_busy(
    machine: Machine, threshold_mib: float = DEFAULT_THRESHOLD_MIB, leases: bool = True
) -> Callable[[DetectedCard], str | None]:
    """Return a function that names the users of a card, and returns `None` if it is free.

    Args:
        threshold_mib: memory on the card from which on a process that computes counts.
        leases: whether another run's lease counts; if not, a leased card counts as free.
    """
    least = threshold_mib * 2**20

    def busy(card: DetectedCard) -> str | None:
        run = holder(card.spec)
        if run is not None:
            return run if leases else None
        # Memory of this process itself, of a notebook say, does not count.
        others = [p for p in card.reading.processes or () if p.pid != os.getpid()]
        computing = [p for p in others if p.computes]
        heavy = [p for p in computing if p.memory_bytes is None or p.memory_bytes >= least]
        if heavy:
            return " and ".join(_described(machine, p.pid, p.memory_bytes) for p in heavy)
        return None if card.reading.processes else _unseen(card)

    return busy


def _described(machine: Machine, pid: int, memory_bytes: int | None) -> str:
    name = machine.text(f"/proc/{pid}/comm")
    who = f"{name} (process {pid})" if name else f"process {pid}"
    return f"{who} holds {memory_bytes / GIB:.1f} GiB" if memory_bytes else f"{who} computes on it"


def _unseen(card: DetectedCard) -> str | None:
    total, free = card.spec.memory_bytes, card.reading.memory_free_bytes
    if total is None or free is None or card.spec.unified_memory:
        return None
    used = total - free
    if used < UNSEEN_FRACTION * total:
        return None
    return f"processes that are not visible from here hold {used / GIB:.1f} GiB"

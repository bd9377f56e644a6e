"""The stages of a run's start. Each process stamps the end of its own, and rank 0 puts them together."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Stamp = tuple[str, float]
"""Stage → end, in seconds of the wall clock, which all processes of a machine share."""
KEY = "start_up"
"""Store key of the launcher's stamps, and of rank 0's after a measurement."""
_stamps: list[Stamp] = []


def ended(stage: str) -> None:
    """Stamp the end of a stage of this process now."""
    if not _stamps:
        _stamps.append(("", _process_start()))
    _stamps.append((stage, time.time()))


def restart() -> None:
    """Begin another start now: a process may have several runs."""
    _stamps[:] = [("", time.time())]


def own() -> str:
    """Return the stamps of this process as JSON, for another process."""
    return json.dumps(_stamps)


def add(stamps: str) -> None:
    """Add what `own` returned in another process."""
    _stamps.extend((stage, at) for stage, at in json.loads(stamps) if stage)


def stages(others: str = "[]") -> list[dict[str, Any]]:
    """Return all stages in the order of their ends: `stage`, and `seconds` since the end before it.

    Stages of several processes overlap; their seconds add up to the time from the first process's start.

    Args:
        others: stamps of another process.
    """
    return between([*_stamps, *((stage, at) for stage, at in json.loads(others))])


def between(stamps: Sequence[Stamp]) -> list[dict[str, Any]]:
    """Return the stages of some stamps; one without a name is the start of a process."""
    begin = min((at for _, at in stamps), default=0.0)
    rows = []
    for stage, at in sorted((stamp for stamp in stamps if stamp[0]), key=lambda stamp: stamp[1]):
        rows.append({"stage": stage, "seconds": round(at - begin, 3)})
        begin = at
    return rows


def _process_start() -> float:
    """Return when this process started, to 10 ms; the present time if the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    return time.time()

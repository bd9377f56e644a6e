"""Checks whether a recorded process still runs, as the system reuses process numbers."""

from __future__ import annotations

import os
from pathlib import Path


def started_at(pid: int) -> str | None:
    """Return a mark that differs from that of a later process of the same number; `None`: gone or not known.

    On Linux it is the process's start, in clock ticks since the start of the machine.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()  # the name before it may hold anything
    return words[19] if len(words) > 19 and words[0] != "Z" else None


def lives(pid: int, mark: str | None = None) -> bool:
    """Return whether a process of this machine runs.

    Args:
        mark: earlier result of `started_at`; another process of the same number does not count.
    """
    if Path("/proc/self/stat").exists():
        now = started_at(pid)
        return now is not None and mark in (None, now)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True

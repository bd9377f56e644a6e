"""Lets go of groups that were left, without a wait.

gloo joins its threads when the last reference to a group is gone, and one of them may sit in a collective
until `comm.timeout_seconds`, its connections shut or not (seen with broadcasts, torch 2.13).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist

LATER_SECONDS = 1.0
"""By then whoever hands things over has let go of them."""


def formed_groups() -> list[Any]:
    """Return all groups of torch.distributed that this process has formed, so that they live on for now."""
    return list(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else []


def let_go(things: list[Any]) -> None:
    """Empty a list a little later, in a thread that may be kept waiting; nothing else may hold its things."""

    def empty() -> None:
        time.sleep(LATER_SECONDS)
        things.clear()

    threading.Thread(target=empty, name="disposal", daemon=True).start()

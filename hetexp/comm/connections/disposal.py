"""Frees groups that a rank has left, without a wait.

gloo joins its threads when the last reference to a group is dropped, and one of them may wait in a collective
until `comm.timeout_seconds`, even if its connections are shut (seen with broadcasts, torch 2.13).
"""

from __future__ import annotations

import threading
import time
from typing import Any

LATER_SECONDS = 1.0
"""By then the caller has dropped its own references."""


def release_later(things: list[Any]) -> None:
    """Empty a list a little later, in a thread that may have to wait; no one else may refer to its items."""

    def empty() -> None:
        time.sleep(LATER_SECONDS)
        things.clear()

    threading.Thread(target=empty, name="disposal", daemon=True).start()

"""Reads single keys from a terminal, without Enter."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SEQUENCES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}


@contextmanager
def keys() -> Iterator[Keys]:
    """Switch the terminal to single keys for the time of the context."""
    if sys.platform == "win32":
        yield Keys(None)
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)  # Ctrl-C still is a signal
    try:
        yield Keys(number)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


class Keys:
    """The keys of a terminal.

    Args:
        number: its file descriptor; `None`: Windows' console.
    """

    def __init__(self, number: int | None) -> None:
        self._number = number

    def wait(self, seconds: float) -> str | None:
        """Return the next key (`a`, `up`), `None` if none comes in time, `q` if no more can come."""
        if self._number is None:
            return self._wait_windows(seconds)
        import select

        if not select.select([self._number], [], [], max(0.0, seconds))[0]:
            return None
        text = os.read(self._number, 16).decode(errors="replace")
        return _SEQUENCES.get(text, text[:1]) if text else "q"  # the terminal is gone

    def _wait_windows(self, seconds: float) -> str | None:
        import msvcrt

        console: Any = msvcrt
        deadline = time.monotonic() + seconds
        while not console.kbhit():
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        key = str(console.getwch())
        if key in ("\x00", "\xe0"):
            return {"H": "up", "P": "down"}.get(str(console.getwch()), "")
        return key

"""A rank's signs of life: a thread of its own counts them in the store, and tells how far the rank is."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetexp.core.epoch import beat_key

BEATS = 5
"""Signs of life within `fault.heartbeat_seconds`."""
STEPS = "steps"
"""What a rank does that trains: any other word is for work that takes as long as it takes."""
WAITING = "waiting"
"""What a rank does that has lost its group, and waits for the launcher's next epoch."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank tells with each sign of life."""

    count: int
    step: int | None = None
    """Steps done so far, `None` before training."""
    doing: str = ""
    step_seconds: float | None = None
    """Mean of the steps since the first sign of life, `None` before any was done."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Heartbeat:
        return cls(**json.loads(text))


def beat(
    store: Any, member: int, heartbeat_seconds: float, tell: Callable[[], tuple[int | None, str]]
) -> None:
    """Let a daemon thread give signs of life until this process ends.

    Args:
        store: a connection used only here: others wait in theirs.
    """
    pause = threading.Event()

    def run() -> None:
        count, (first, _), began = 0, tell(), time.monotonic()
        last, mean = first, None
        with contextlib.suppress(RuntimeError):  # the launcher is gone, and the lifeline knows what to do
            while True:
                count += 1
                step, doing = tell()
                if step != last:  # while a step hangs its time is no step's
                    mean = (time.monotonic() - began) / max(1, (step or 0) - (first or 0))
                    last = step
                store.set(beat_key(member), Heartbeat(count, step, doing, mean).to_json())
                pause.wait(heartbeat_seconds / BEATS)

    threading.Thread(target=run, name="heart", daemon=True).start()


def show_stack_on_request(path: Path) -> None:
    """Write every thread's stack into a file when the launcher asks, also in the midst of C.

    A disk without room for the file does not stop the training: a hang is found without a stack.
    """
    if not hasattr(signal, "SIGUSR1"):
        return
    with contextlib.suppress(OSError):
        # It stays open until the process ends, and has no buffer: a signal's handler writes into it.
        file = path.open("ab", buffering=0)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)

"""A rank's heartbeats: a daemon thread writes them to the store, with the progress of the rank."""

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

from hetexp.core.epoch import SignedStore, beat_key

BEATS = 5
"""Heartbeats within `fault.heartbeat_seconds`."""
STEPS = "steps"
"""`Heartbeat.doing` of a rank that trains. Other words stand for work without a time limit."""
WAITING = "waiting"
"""`Heartbeat.doing` of a rank that has lost its group, and waits for the launcher's next epoch."""


@dataclass(frozen=True)
class Heartbeat:
    """One heartbeat of a rank."""

    count: int
    step: int | None = None
    """Steps done so far, `None` before training."""
    doing: str = ""
    step_seconds: float | None = None
    """Mean of the steps since the first heartbeat; `None` before the first step."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Heartbeat:
        return cls(**json.loads(text))


def beat(
    store: SignedStore,
    member: int,
    heartbeat_seconds: float,
    progress: Callable[[], tuple[int | None, str]],
) -> None:
    """Send heartbeats in a daemon thread until this process ends.

    Args:
        store: a connection for the heartbeats alone, because other threads wait in theirs.
        progress: returns the steps done so far, and what the rank does.
    """
    pause = threading.Event()

    def run() -> None:
        count, (first, _), began = 0, progress(), time.monotonic()
        last, mean = first, None
        with contextlib.suppress(RuntimeError):  # the launcher is gone, and `end_with_launcher` ends the rank
            while True:
                count += 1
                step, doing = progress()
                if step != last:  # the time of a step that hangs does not count
                    mean = (time.monotonic() - began) / max(1, (step or 0) - (first or 0))
                    last = step
                store.write(beat_key(member), Heartbeat(count, step, doing, mean).to_json())
                pause.wait(heartbeat_seconds / BEATS)

    threading.Thread(target=run, name="heart", daemon=True).start()


def show_stack_on_request(path: Path) -> None:
    """Write every thread's stack into a file on SIGUSR1, even while the rank is inside C code.

    A full disk does not stop the training: a hang is then detected without a stack.
    """
    if not hasattr(signal, "SIGUSR1"):
        return
    with contextlib.suppress(OSError):
        # It stays open until the process ends, and has no buffer, because a signal handler writes to it.
        file = path.open("ab", buffering=0)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)

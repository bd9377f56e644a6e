"""Injects the faults of `fault.events` into a device: slow-downs, errors, hangs and the death of its rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hetexp.core.device import DeviceSpec
from hetexp.core.fault import Due, FaultSchedule
from hetexp.hardware.base import Backend

OPEN_FILES = Path("/dev/fd")
ORDERED = "as `fault.events` orders"


class FaultyBackend(Backend):
    """A backend whose device suffers the faults of `fault.events`."""

    def __init__(self, spec: DeviceSpec) -> None:
        super().__init__(spec)
        self.faults = FaultSchedule([], spec.id)
        self.spared_port: int | None = None
        """Port of the launcher's store: connections to it survive a fault of the network."""
        self.deviation_seed: int | None = None
        """Makes an emulated card differ from its figures (`hardware.deviation_seed`)."""
        self.slower = spec.slow
        """Current factor by which the device is slowed down."""
        self._first_step_at: float | None = None

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if step < 0 or not self.faults.events:  # below 0: a rehearsal
            return
        now = time.perf_counter()
        self._first_step_at = self._first_step_at or now
        elapsed = now - self._first_step_at
        self.slower = self.spec.slow * self.faults.factor(step, elapsed)
        for due in self.faults.due(step, elapsed):
            suffer(due, str(self.spec), self.spared_port)


def suffer(due: Due, device: str, spared_port: int | None = None) -> None:
    """Cause a sudden fault in this process, which drives the device.

    Args:
        device: name of the device in errors.
        spared_port: connections to it survive a `comms` fault.

    Raises:
        torch.OutOfMemoryError: the fault is an out-of-memory error.
        torch.AcceleratorError: the fault is an error of the device.
    """
    import torch

    def fail(error: type[Exception], text: str) -> Callable[[], None]:
        def raise_it() -> None:
            raise error(f"{text} on {device}, {ORDERED}.")

        return raise_it

    happen: dict[str, Callable[[], object]] = {
        "stall": lambda: time.sleep(due.seconds),
        "death": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "segfault": lambda: ctypes.string_at(0),
        "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "hang": lambda: threading.Event().wait(),
        "comms": lambda: break_connections(spared_port),
        "device_error": fail(torch.AcceleratorError, "Device error: unspecified launch failure"),
        "oom": fail(torch.OutOfMemoryError, "Out of memory"),
    }
    happen[due.kind]()


def break_connections(spared_port: int | None = None) -> int:
    """Shut down every TCP connection of this process, as a failing network does.

    Args:
        spared_port: connections to this port of another process live on.

    Returns:
        The number of connections that broke.
    """
    broken = 0
    for entry in list(OPEN_FILES.iterdir()):
        with contextlib.suppress(OSError):  # already closed, or not connected
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if inet and connection.getpeername()[1] != spared_port:
                    connection.shutdown(socket.SHUT_RDWR)
                    broken += 1
    return broken

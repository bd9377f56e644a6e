"""A job of a sweep takes devices that no other run holds, or waits for them.

One lock over all processes covers choosing the cards and taking them. Within a sweep one job at a time has
the CPU of this machine, and with it the emulated devices. Two such jobs would slow each other down, and their
figures could not be compared.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.detection.lease import Leases, choosing, held_by_others
from hetexp.launch.terminal.lines import print_line
from hetexp.plan.run_spec import CheckedRun, Request

POLL_SECONDS = 0.5
SETTLE_SECONDS = 5.0
"""How long a card may look busy after its run has ended: drivers notice the end of a process late."""
CPU_LEASE = ".cpu"


Check = Callable[[bool], CheckedRun]
"""Checks the configuration and selects its devices; with `False`, as if no run held a card."""


@contextmanager
def reserved(check: Check, request: Request, console: Console) -> Iterator[CheckedRun]:
    """Check a run; a run of a sweep also holds its devices while the context lasts.

    Yields:
        The last result of `check`, with problems if the run cannot start.

    Raises:
        SetupError: the devices were held by others for longer than `sweep.wait_seconds`.
    """
    checked = check(True)
    if request.sweep is None or checked.spec is None or checked.spec.config.plan_only:
        yield checked
        return
    if checked.problems and check(False).problems:  # waiting would not help
        yield checked
        return
    checked, leases = _Reservation(check, request, console, checked.spec.config).take(checked)
    try:
        yield checked
    finally:
        leases.__exit__()


class _Reservation:
    """Takes the devices of one job."""

    def __init__(self, check: Check, request: Request, console: Console, config: Config) -> None:
        self._check, self._request, self._console, self._config = check, request, console, config
        self._shown: list[str] = []
        self._held_until = -math.inf

    def take(self, checked: CheckedRun) -> tuple[CheckedRun, Leases]:
        """Return the checked run, which has its devices or problems that waiting does not solve.

        Args:
            checked: without a lock, which suffices if there is no card to choose.
        """
        limit, started = self._config.sweep.wait_seconds, time.monotonic()
        pause = threading.Event()
        while True:
            if checked.problems or any(device.number is not None for device in _devices(checked)):
                with choosing():
                    checked, leases, done = self._try(self._check(True))
            else:
                checked, leases, done = self._try(checked)
            if done:
                return checked, leases
            blocked, held = leases.holders(), held_by_others()
            self._show(blocked)
            while blocked and (blocked, held) == (leases.holders(), held_by_others()):
                self._held_until = time.monotonic()
                if limit is not None and time.monotonic() - started >= limit:
                    holders = "; ".join(blocked)
                    raise SetupError(f"{holders}: not free within {limit:g} s (sweep.wait_seconds).")
                pause.wait(POLL_SECONDS)
            if not blocked:
                pause.wait(POLL_SECONDS)

    def _try(self, checked: CheckedRun) -> tuple[CheckedRun, Leases, bool]:
        """Return the checked run, its leases, and whether there is nothing more to wait for."""
        if not checked.problems:
            leases = self._leases(checked)
            try:
                return checked, leases.__enter__(), True
            except SetupError:
                return checked, leases, False
        as_if_free = self._check(False)
        if not as_if_free.problems:
            return checked, self._leases(as_if_free), False
        settled = time.monotonic() - self._held_until > SETTLE_SECONDS
        return checked, self._leases(checked), settled

    def _leases(self, checked: CheckedRun) -> Leases:
        hardware, sweep = self._config.hardware, self._config.sweep
        assert self._request.sweep is not None
        devices = _devices(checked)
        if hardware.share_devices:  # a shared card is not leased
            devices = [device for device in devices if device.number is None]
        cpu = None if sweep.share_cpu else self._request.sweep / CPU_LEASE
        return Leases(devices, str(self._request.run_dir), cpu, reserve=True)

    def _show(self, blocked: list[str]) -> None:
        # Once for the same devices: a run that ends has no name for a moment.
        devices = [text.partition(", held by")[0] for text in blocked]
        if blocked and devices != self._shown:
            print_line(self._console, f"{self._request.run_dir.name} waits for {'; '.join(blocked)}.")
        self._shown = devices or self._shown


def _devices(checked: CheckedRun) -> list[DeviceSpec]:
    return checked.spec.selection.devices if checked.spec is not None else []

"""A job of a sweep gets devices that no other run holds, or waits for them.

Choosing and taking are one thing over all processes: under one lock the cards are asked who holds them, and
taken. The CPU of this machine, and with it emulated devices, are one job's at a time within the sweep: two of
them would slow each other, and their figures would compare nothing.
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
from hetexp.plan.run_spec import CheckedRun, Request

POLL_SECONDS = 0.5
SETTLE_SECONDS = 5.0
"""How long a card may look busy after its run has given it back: drivers forget processes a little late."""
CPU_LEASE = ".cpu.lock"


Check = Callable[[bool], CheckedRun]
"""Checks the configuration and selects its devices; with `False`, as if no run held a card."""


@contextmanager
def reserved(check: Check, request: Request, console: Console) -> Iterator[CheckedRun]:
    """Check a run; a sweep's run also gets its devices, for as long as the context lasts.

    Yields:
        What `check` found last, with problems where the run cannot start.

    Raises:
        SetupError: the devices were held by others for longer than `sweep.wait_seconds`.
    """
    found = check(True)
    if request.sweep is None or found.spec is None or found.spec.config.plan_only:
        yield found
        return
    if found.problems and check(False).problems:  # nothing that waiting would mend
        yield found
        return
    found, leases = _Reservation(check, request, console, found.spec.config).take(found)
    try:
        yield found
    finally:
        leases.__exit__()


class _Reservation:
    """One job's way to its devices."""

    def __init__(self, check: Check, request: Request, console: Console, config: Config) -> None:
        self._check, self._request, self._console, self._config = check, request, console, config
        self._said: list[str] = []
        self._held_until = -math.inf

    def take(self, found: CheckedRun) -> tuple[CheckedRun, Leases]:
        """Return what was found when the devices were taken, or when it was sure that the run cannot start.

        Args:
            found: by a check under no lock, which suffices where there is no card to choose.
        """
        limit, started = self._config.sweep.wait_seconds, time.monotonic()
        pause = threading.Event()
        while True:
            if found.problems or any(device.number is not None for device in _devices(found)):
                with choosing():
                    found, leases, taken = self._try(self._check(True))
            else:
                found, leases, taken = self._try(found)
            if taken:
                return found, leases
            blocked, held = leases.holders(), held_by_others()
            self._tell(blocked)
            while blocked and (blocked, held) == (leases.holders(), held_by_others()):
                self._held_until = time.monotonic()
                if limit is not None and time.monotonic() - started >= limit:
                    holders = "; ".join(blocked)
                    raise SetupError(f"{holders}: not free within {limit:g} s (sweep.wait_seconds).")
                pause.wait(POLL_SECONDS)
            if not blocked:
                pause.wait(POLL_SECONDS)

    def _try(self, found: CheckedRun) -> tuple[CheckedRun, Leases, bool]:
        """Return what is found, its leases, and whether this is the end of waiting."""
        if not found.problems:
            leases = self._leases(found)
            try:
                return found, leases.__enter__(), True
            except SetupError:
                return found, leases, False
        as_if_free = self._check(False)
        if not as_if_free.problems:
            return found, self._leases(as_if_free), False
        settled = time.monotonic() - self._held_until > SETTLE_SECONDS
        return found, self._leases(found), settled

    def _leases(self, found: CheckedRun) -> Leases:
        hardware, sweep = self._config.hardware, self._config.sweep
        assert self._request.sweep is not None
        devices = _devices(found)
        if hardware.share_devices:  # a shared card is not leased
            devices = [device for device in devices if device.number is None]
        cpu = None if sweep.share_cpu else self._request.sweep / CPU_LEASE
        return Leases(devices, str(self._request.run_dir), cpu, reserve=True)

    def _tell(self, blocked: list[str]) -> None:
        # Once for the same devices: a run that is giving one back has no name for a moment.
        devices = [text.partition(", held by")[0] for text in blocked]
        if blocked and devices != self._said:
            self._console.print(
                f"{self._request.run_dir.name} waits for {'; '.join(blocked)}.",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        self._said = devices or self._said


def _devices(found: CheckedRun) -> list[DeviceSpec]:
    return found.spec.selection.devices if found.spec is not None else []

"""Processes for devices that join a running training: lost devices, and new ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.epoch import SignedStore, prepared_key
from hetexp.core.errors import SetupError
from hetexp.core.plan import Plan
from hetexp.hardware.backends.cpu import cpu_count
from hetexp.launch.elastic.membership import Membership, write_plan
from hetexp.launch.processes.hosts import is_here
from hetexp.launch.processes.members import Member, start_member, start_of
from hetexp.launch.processes.spare import Spares

CORES_A_RANK = 4
"""Of a host on which imports slow down no rank."""

Report = Callable[[bool, str], None]
"""Callback(joined, message)."""


@dataclass(frozen=True)
class Newcomer:
    """A device that is new in the run, and its part of the work."""

    device: DeviceSpec
    share: float
    precision: str
    threads: int


@dataclass
class _Arrival:
    """A device that is to join."""

    device: DeviceSpec
    due: float
    """When to start its process, by the monotonic clock."""
    report: Report
    newcomer: Newcomer | None = None
    """Its addition to the plan; `None` for a device that has a place there."""
    member: Member | None = None
    started: float = 0.0


class Respawns:
    """Starts a process for each device that is to join, and adds it to the members once it is prepared.

    Args:
        store: the launcher's connection to the store.
        started: every process of the run; processes that start here are added to it.
        show: shows a line to the user.
    """

    def __init__(
        self,
        membership: Membership,
        config: Config,
        store: SignedStore,
        started: list[Member],
        show: Callable[[str], None],
    ) -> None:
        self._membership, self._config, self._store = membership, config, store
        self._started, self._show = started, show
        self._arriving: list[_Arrival] = []
        self._joining: dict[int, _Arrival] = {}
        self._tries: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        """Device → starts in a row after which it did not take part."""
        self._spares = Spares(config.launch.start_method)

    def after_loss(self, device: DeviceSpec) -> None:
        """Restart a lost device after a pause, at most `fault.respawn` times.

        The pause doubles with each start in a row that has failed.
        """
        fault, tries = self._config.fault, self._tries.get(device.id, 0)
        if tries < fault.respawn:
            failed = self._failed.get(device.id, 0)
            self._tries[device.id], self._failed[device.id] = tries + 1, failed + 1
            due = time.monotonic() + fault.respawn_seconds * 2**failed
            self._arriving.append(_Arrival(device, due, lambda done, text: self._show(text)))

    def start(self, device: DeviceSpec, report: Report, newcomer: Newcomer | None = None) -> None:
        """Start a process for a device now.

        Args:
            newcomer: if the device is new in the run.
        """
        self.cancel(device.id)
        self._arriving.append(_Arrival(device, time.monotonic(), report, newcomer))

    def cancel(self, device_id: str) -> bool:
        """Cancel the start of a device, and return whether there was one."""
        cancelled = [arrival for arrival in self._arriving if arrival.device.id == device_id]
        for arrival in cancelled:
            self._arriving.remove(arrival)
            if arrival.member is not None:
                arrival.member.kill()
            arrival.report(False, f"{device_id} does not come: it was taken out.")
        return bool(cancelled)

    def stop(self) -> None:
        """Cancel all devices: the training is over."""
        for arrival in (*self._arriving, *self._joining.values()):
            if arrival.member is not None:
                arrival.member.kill()
            arrival.report(False, f"{arrival.device.id} does not come: the training is over.")
        self._arriving.clear()
        self._joining.clear()

    def poll(self) -> None:
        """Start the processes that are due, add prepared ones, and retry those that failed."""
        for arrival in list(self._arriving):
            if arrival.member is None:
                if time.monotonic() >= arrival.due:
                    self._start(arrival)
            elif arrival.member.process.poll() is not None:
                self._arriving.remove(arrival)
                arrival.report(
                    False, f"{arrival.device} did not come back; its log: {arrival.member.log_path}"
                )
                if arrival.newcomer is None:
                    self.after_loss(arrival.device)
            elif not self._membership.forming and self._store.read(prepared_key(arrival.member.number)):
                self._arriving.remove(arrival)
                self._join(arrival, arrival.member.number)

    def keep_spare(self) -> None:
        """Keep processes waiting for the next lost devices, if the configuration allows it.

        Their imports do not slow down a device that joins: on a host of few cores they wait until it has.
        """
        fault, whole = self._config.fault, self._membership.whole
        here = [rank for rank, device in enumerate(whole.devices) if is_here(device)]
        wanted = fault.spare
        if wanted is None:
            wanted = any(whole.devices[rank].backend not in ("cpu", "emulated") for rank in here)
        joining = bool(self._arriving or self._joining) and cpu_count() < CORES_A_RANK * len(here)
        if wanted and fault.respawn and whole.world_size > 1 and not joining:
            path = Path(whole.run_dir) / "plan.json"
            self._spares.keep(start_of(whole, path, rank, self._store.secret) for rank in here)

    def close(self) -> None:
        """End the processes that wait for a lost device."""
        self._spares.close()

    def formed(self, step: int | None) -> None:
        """Report the devices that joined with the newest epoch.

        Args:
            step: from which they take part.
        """
        for number in self._membership.joined:
            arrival = self._joining.pop(number, None)
            if arrival is not None:
                self._failed.pop(arrival.device.id, None)
                seconds = time.monotonic() - arrival.started
                arrival.report(
                    True, f"{arrival.device} takes part from step {step} on, {seconds:.1f} s after its start"
                )

    def lost(self, number: int) -> None:
        """Report a member that was lost before its group had formed."""
        arrival = self._joining.pop(number, None)
        if arrival is not None:
            arrival.report(False, f"{arrival.device} was lost while it joined")

    def _join(self, arrival: _Arrival, number: int) -> None:
        self._joining[number] = arrival
        new, place = arrival.newcomer, self._membership.place_of(arrival.device.id)
        if place is None:
            assert new is not None
            place = self._membership.extend(new.device, new.share, new.precision, new.threads)
        self._membership.join({number: place})

    def _start(self, arrival: _Arrival) -> None:
        plan, rank = self._plan_with(arrival)
        number = 1 + max(member.number for member in self._started)
        path = Path(plan.run_dir) / "plans" / f"member_{number}.json"
        arrival.started = time.monotonic()
        try:
            write_plan(plan, path)
            arrival.member = start_member(
                plan,
                path,
                rank,
                self._config.launch.start_method,
                self._store.secret,
                number,
                True,
                self._spares,
            )
        except (SetupError, OSError) as error:  # the others go on without it
            self._arriving.remove(arrival)
            arrival.report(False, str(error))
            return
        self._started.append(arrival.member)

    def _plan_with(self, arrival: _Arrival) -> tuple[Plan, int]:
        new, place = arrival.newcomer, self._membership.place_of(arrival.device.id)
        if place is not None:
            return self._membership.plan_with(place)
        assert new is not None
        return self._membership.plan_with_new(new.device, new.share, new.precision, new.threads)

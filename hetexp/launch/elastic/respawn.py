"""Devices on their way into a training under way: lost ones that are started again, and new ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.epoch import prepared_key
from hetexp.core.errors import SetupError
from hetexp.core.plan import Plan
from hetexp.launch.elastic.membership import Membership, write_plan
from hetexp.launch.processes.members import Member, start_member

Report = Callable[[bool, str], None]
"""Learns whether a device has come, and in words what became of it."""


@dataclass(frozen=True)
class Newcomer:
    """A device that the run has not had, and its part of the work."""

    device: DeviceSpec
    share: float
    precision: str
    threads: int


@dataclass
class _Coming:
    """A device on its way."""

    device: DeviceSpec
    due: float
    """When its process is to be started, by the monotonic clock."""
    report: Report
    newcomer: Newcomer | None = None
    """What is to be added to the plan; `None` for a device that has a place there."""
    member: Member | None = None
    started: float = 0.0


class Respawns:
    """Starts a process for each device that is to come, and takes it in once it is prepared.

    Args:
        started: every process of the run; what is started here is added to it.
        tell: shows a line to the person.
    """

    def __init__(
        self,
        membership: Membership,
        config: Config,
        store: Any,
        started: list[Member],
        tell: Callable[[str], None],
    ) -> None:
        self._membership, self._config, self._store = membership, config, store
        self._started, self._tell = started, tell
        self._coming: list[_Coming] = []
        self._joining: dict[int, _Coming] = {}
        self._tries: dict[str, int] = {}

    def after_loss(self, device: DeviceSpec) -> None:
        """Let a lost device come back after a pause, if it has not come back often enough."""
        fault, tries = self._config.fault, self._tries.get(device.id, 0)
        if tries < fault.respawn:
            self._tries[device.id] = tries + 1
            due = time.monotonic() + fault.respawn_seconds * 2**tries
            self._coming.append(_Coming(device, due, lambda done, text: self._tell(text)))

    def bring(self, device: DeviceSpec, report: Report, newcomer: Newcomer | None = None) -> None:
        """Start a process for a device now.

        Args:
            newcomer: where the run has not had it.
        """
        self.forget(device.id)
        self._coming.append(_Coming(device, time.monotonic(), report, newcomer))

    def forget(self, device_id: str) -> bool:
        """Let a device not come, and tell whether it was on its way."""
        left = [one for one in self._coming if one.device.id == device_id]
        for one in left:
            self._coming.remove(one)
            if one.member is not None:
                one.member.kill()
            one.report(False, f"{device_id} does not come: it was taken out.")
        return bool(left)

    def stop(self) -> None:
        """Let no device come any more: the training is over."""
        for one in (*self._coming, *self._joining.values()):
            if one.member is not None:
                one.member.kill()
            one.report(False, f"{one.device.id} does not come: the training is over.")
        self._coming.clear()
        self._joining.clear()

    def poll(self) -> None:
        """Do what is due."""
        for one in list(self._coming):
            if one.member is None:
                if time.monotonic() >= one.due:
                    self._start(one)
            elif one.member.process.poll() is not None:
                self._coming.remove(one)
                one.report(False, f"{one.device} did not come back; its log: {one.member.log_path}")
                if one.newcomer is None:
                    self.after_loss(one.device)
            elif not self._membership.forming and self._store.check([prepared_key(one.member.number)]):
                self._coming.remove(one)
                self._join(one, one.member.number)

    def formed(self, step: int | None) -> None:
        """Tell of those that have come with the newest epoch."""
        for number in self._membership.joined:
            one = self._joining.pop(number, None)
            if one is not None:
                seconds = time.monotonic() - one.started
                one.report(
                    True, f"{one.device} takes part from step {step} on, {seconds:.1f} s after its start"
                )

    def lost(self, number: int) -> None:
        """Tell of a member that was lost before its group had formed."""
        one = self._joining.pop(number, None)
        if one is not None:
            one.report(False, f"{one.device} was lost while it joined")

    def _join(self, one: _Coming, number: int) -> None:
        self._joining[number] = one
        new = one.newcomer
        if new is not None and self._membership.place_of(new.device.id) is None:
            place = self._membership.extend(new.device, new.share, new.precision, new.threads)
        else:
            known = self._membership.place_of(one.device.id)
            assert known is not None
            place = known
        self._membership.join({number: place})

    def _start(self, one: _Coming) -> None:
        plan, rank = self._plan_with(one)
        number = 1 + max(member.number for member in self._started)
        path = Path(plan.run_dir) / "plans" / f"member_{number}.json"
        one.started = time.monotonic()
        try:
            write_plan(plan, path)
            one.member = start_member(plan, path, rank, self._config.launch.start_method, number, begins=True)
        except (SetupError, OSError) as error:  # the others do without it
            self._coming.remove(one)
            one.report(False, str(error))
            return
        self._started.append(one.member)

    def _plan_with(self, one: _Coming) -> tuple[Plan, int]:
        new, place = one.newcomer, self._membership.place_of(one.device.id)
        if place is not None:
            return self._membership.plan_with(place)
        assert new is not None
        return self._membership.plan_with_new(new.device, new.share, new.precision, new.threads)

"""What the launcher does so that a run outlives its devices: takes lost ones out, and brings them back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.core.config import Config
from hetexp.core.epoch import Departure, prepared_key
from hetexp.core.errors import SetupError
from hetexp.core.instantiate import instantiate
from hetexp.core.plan import Plan
from hetexp.launch.members import Member, start_member
from hetexp.launch.membership import Membership, device_trouble, write_plan
from hetexp.launch.report import RankFailure
from hetexp.launch.watch import Watch
from hetexp.plan.replan import replan


@dataclass
class _Return:
    """A device on its way back."""

    place: int
    due: float
    """When its process is to be started, by the monotonic clock."""
    member: Member | None = None


class Survival:
    """The members of a running training, in this epoch and in those to come.

    Args:
        started: every process of the run; what is started later is added to it.
        store: the launcher's own end of it.
    """

    def __init__(
        self, plan: Plan, config: Config, console: Console, store: Any, started: list[Member]
    ) -> None:
        self._config, self._console, self._store = config, console, store
        self._started = started
        self.membership = Membership(plan, store)
        self._watch = Watch(store, config.fault.heartbeat_seconds)
        self.begun = False
        self.refused = ""
        """Why the run could not go on without a device."""
        self.causes: list[RankFailure] = []
        """What became of the members that were taken out last, until the others have formed anew."""
        self._returns: list[_Return] = []
        self._tries: dict[int, int] = {}

    @cached_property
    def reforms(self) -> bool:
        """Whether ranks form their group anew when a member goes."""
        wanted = self._config.fault.survive and self.membership.whole.script is None
        return wanted and bool(instantiate(self._config.strategy).reforms)

    @property
    def present(self) -> list[Member]:
        """Those that train now, in the order of their ranks."""
        by_number = {member.number: member for member in self._started}
        return [by_number[number] for number in self.membership.members]

    @property
    def coming(self) -> list[Member]:
        """Those that are about to join."""
        return [one.member for one in self._returns if one.member is not None]

    def begin(self) -> None:
        """Be ready for the first loss: the training has begun."""
        self.begun = True
        if self.reforms and self.membership.whole.world_size > 1:
            replan(self.membership.whole, [0])  # so that nothing is imported when it matters

    def lose(self, found: Mapping[Member, tuple[RankFailure, int]]) -> bool:
        """Take members out that have failed, and let the others go on; tell whether that can be.

        Args:
            found: why each of them failed, and its exit code.
        """
        kinds = {member: device_trouble(failure, code) for member, (failure, code) in found.items()}
        lost = {member: kind for member, kind in kinds.items() if kind is not None}
        if not self.begun or not self.reforms or len(lost) < len(kinds):
            return False
        return self.remove({member: replace(found[member][0], kind=kind) for member, kind in lost.items()})

    def remove(self, lost: Mapping[Member, RankFailure]) -> bool:
        """Kill some members, and let the others go on; tell whether that can be.

        Args:
            lost: what became of each of them; `kind` is what the summary says.
        """
        self.causes += lost.values()
        for member in lost:
            member.kill()  # its sockets close, its locks fall: whoever waits for it learns of it
        rest = [member for member in self.present if member not in lost]
        if len(rest) < self._config.fault.min_devices or not rest:
            least = self._config.fault.min_devices
            self.refused = (
                f"{len(rest)} of its devices are left, and `fault.min_devices` is {least}."
                if rest
                else "None of its devices is left."
            )
            return False
        if any(member.process.poll() is not None for member in rest):
            return False  # the others have finished, or fail as well
        now = time.time()
        departures = {
            member.number: Departure(member.number, member.device.id, failure.kind, now)
            for member, failure in lost.items()
        }
        self.membership.leave(departures, {failure.rank: failure.step for failure in lost.values()})
        for member in lost:
            self._schedule(member.device.id)
        return True

    def poll(self) -> bool:
        """Look for what has happened since the last call.

        Returns:
            Whether the run can go on.
        """
        if not self.begun or not self.reforms:
            return True
        told = self.membership.told()
        if told is not None:
            self._tell_formed(told)
        for one in list(self._returns):
            self._bring(one)
        frozen = self._watch.frozen(self.present)
        return not frozen or self.remove({member: self._frozen(member) for member in frozen})

    def _frozen(self, member: Member) -> RankFailure:
        beat = self._watch.beat_of(member.number)
        limit = self._config.fault.heartbeat_seconds
        text = f"It gave no sign of life, and did no work, for {limit:g} s (fault.heartbeat_seconds)."
        step = beat.step if beat is not None else None
        return RankFailure(member.number, "Frozen", text, step, time=time.time())

    def _tell_formed(self, told: Mapping[str, Any]) -> None:
        self.causes.clear()
        plan = self.membership.plan
        many = "device goes" if plan.world_size == 1 else "devices go"
        for loss in self.membership.untold():
            self._say(
                f"{loss.device} was lost at step {loss.step} ({loss.kind}); {plan.world_size} {many} on, "
                f"{loss.recovered_seconds:.2f} s"
            )
        for number in self.membership.joined:
            device = next(member.device for member in self._started if member.number == number)
            self._say(f"{device} is back from step {told.get('step')} on; {told['waited']:.2f} s")

    def _schedule(self, device_id: str) -> None:
        """Plan the return of a device that was lost."""
        fault = self._config.fault
        place = self.membership.place_of(device_id)
        assert place is not None
        tries = self._tries.get(place, 0)
        if tries < fault.respawn:
            self._tries[place] = tries + 1
            due = time.monotonic() + fault.respawn_seconds * 2**tries
            self._returns.append(_Return(place, due))

    def _bring(self, one: _Return) -> None:
        """Do the next thing on a device's way back, if its time has come."""
        if one.member is None:
            if time.monotonic() >= one.due:
                one.member = self._start(one)
            return
        if one.member.process.poll() is not None:
            self._returns.remove(one)
            self._say(f"{one.member.device} did not come back; its log: {one.member.log_path}")
            self._schedule(one.member.device.id)
        elif not self.membership.forming and self._store.check([prepared_key(one.member.number)]):
            self._returns.remove(one)
            self.membership.join({one.member.number: one.place})

    def _start(self, one: _Return) -> Member | None:
        plan, rank = self.membership.plan_with(one.place)
        number = 1 + max(member.number for member in self._started)
        path = Path(plan.run_dir) / "plans" / f"member_{number}.json"
        write_plan(plan, path)
        try:
            member = start_member(plan, path, rank, self._config.launch.start_method, number, begins=True)
        except SetupError as error:
            self._returns.remove(one)
            self._say(str(error))
            return None
        self._started.append(member)
        return member

    def _say(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

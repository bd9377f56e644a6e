"""What the launcher does so that a run outlives its devices: takes lost ones out, and brings them back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from rich.console import Console

from hetexp.core.epoch import Departure
from hetexp.core.plan import Plan
from hetexp.launch.elastic.hang_detection import HangWatch, Hung
from hetexp.launch.elastic.health import HealthMonitor
from hetexp.launch.elastic.heartbeat import WAITING
from hetexp.launch.elastic.membership import Membership, device_trouble
from hetexp.launch.elastic.respawn import Respawns
from hetexp.launch.processes.failure import RankFailure
from hetexp.launch.processes.hosts import is_here
from hetexp.launch.processes.members import Member
from hetexp.plan.replan import replan
from hetexp.plan.run_spec import RunSpec

NONE_HERE = "No device of this machine, where the run's folder is, is left."
FORMING_TRIES = 4
"""Epochs in a row whose group did not form, after which the members' own error ends the run."""


class GroupRecovery:
    """The members of a running training, in this epoch and in those to come.

    Args:
        started: every process of the run; what is started later is added to it.
        store: the launcher's own end of it.
    """

    def __init__(
        self, plan: Plan, spec: RunSpec, console: Console, store: Any, started: list[Member]
    ) -> None:
        self._config, self._strategy, self._store = spec.config, spec.strategy, store
        config = spec.config
        self._started = started
        self.membership = Membership(plan, store)
        self._watch = HealthMonitor(store, config.fault.heartbeat_seconds)
        self._hang_watch = HangWatch(self._watch, _predicted_seconds(plan))
        self._waiting_since: float | None = None
        """Since when a member has waited for an epoch that there was no reason to publish."""
        self.begun = self._over = False
        self.refused = ""
        """Why the run could not go on without a device."""
        self.causes: list[RankFailure] = []
        """What became of the members that were taken out last, until the others have re-formed."""
        # Nothing here refers to what holds it: the store's port is free as soon as the run is let go.
        self._say = partial(_say, console)
        self.returns = Respawns(self.membership, config, store, started, self._say)

    @property
    def reforms(self) -> bool:
        """Whether ranks re-form their group when a member goes."""
        able = self.membership.whole.reforms and self._strategy.reforms and not self.deaf
        return self._config.fault.survive and able

    @cached_property
    def deaf(self) -> str:
        """Why ranks do not listen to requests while they train; empty where they do."""
        if self.membership.whole.measuring:
            return "Devices that are measured have nothing to lose."
        if self.membership.whole.script is not None:
            return "A person's own script (hetexp launch) has a loop that hetexp cannot change."
        return self._strategy.ignores_commands()

    @property
    def may_start_again(self) -> bool:
        """Whether the run has begun to train, and is to outlive its devices."""
        return self.begun and self._config.fault.survive and not self.membership.whole.measuring

    @property
    def newest_step(self) -> int | None:
        """Steps that were done, as far as any member has reported."""
        beats = [self._watch.beat_of(member.number) for member in self._started]
        steps = [beat.step for beat in beats if beat is not None and beat.step is not None]
        steps += [failure.step for failure in self.causes if failure.step is not None]
        return max(steps, default=None)

    @property
    def troubled(self) -> set[int]:
        """Members that were lost for what happened to their devices, since all have trained together."""
        return {failure.rank for failure in self.causes}

    @property
    def present(self) -> list[Member]:
        """Those that train now, in the order of their ranks."""
        by_number = {member.number: member for member in self._started}
        return [by_number[number] for number in self.membership.members]

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
        if not self.begun or len(lost) < len(kinds):
            return False
        return self.remove({member: replace(found[member][0], kind=kind) for member, kind in lost.items()})

    def blame(self, found: Mapping[Member, tuple[RankFailure, int]]) -> None:
        """Count members that ended with the run as lost devices, if it has no cause yet and none failed.

        A rank may lose its peer before the launcher hears what happened to that peer.

        Args:
            found: why each of them failed, and its exit code.
        """
        kinds = {member: device_trouble(failure, code) for member, (failure, code) in found.items()}
        if self.begun and not self.causes and None not in kinds.values():
            failures = [replace(found[member][0], kind=str(kind)) for member, kind in kinds.items()]
            self.causes += [failure for failure in failures if not failure.peer_lost]

    def remove(self, lost: Mapping[Member, RankFailure]) -> bool:
        """Kill some members, and let the others go on; tell whether that can be.

        Args:
            lost: what became of each of them; `kind` is what the summary says.
        """
        self.causes += [failure for failure in lost.values() if not failure.peer_lost]
        for member in lost:
            member.kill()  # its sockets close, its locks fall: whoever waits for it learns of it
        if not self.reforms:
            return False
        rest = [member for member in self.present if member not in lost]
        if len(rest) < self._config.fault.min_devices or not rest:
            least = self._config.fault.min_devices
            self.refused = (
                f"{len(rest)} of its devices are left, and `fault.min_devices` is {least}."
                if rest
                else "None of its devices is left."
            )
            return False
        if not is_here(rest[0].device):  # the first rank writes the run's folder
            self.refused = NONE_HERE
            self._say(f"The run does not go on. {self.refused}")
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
            self.returns.lost(member.number)
            self.returns.after_loss(member.device)
        return True

    def poll(self) -> bool:
        """Look for what has happened since the last call.

        Returns:
            Whether the run can go on.
        """
        if not self.begun or not self._config.fault.survive or self.membership.whole.measuring:
            return True
        if self._finished():
            return True
        report = self.membership.take_report()
        if report is not None:
            self._tell_formed(report)
        self.returns.poll()
        lost = {member: self._frozen(member) for member in self._watch.frozen(self.present)}
        if not lost and not self.membership.forming:
            lost = {one.member: self._hung(one) for one in self._hang_watch.look(self.present)}
        if not lost:
            self._reconnect()
        if not lost and self.membership.forming_seconds > self._hang_watch.bound_seconds:
            lost = {member: self._stays(member) for member in self._hang_watch.in_steps(self.present)}
        return not lost or self.remove(lost)

    def _finished(self) -> bool:
        """Tell whether a member has done the last step, after which no member is lost and none comes."""
        if not self._over and any(member.process.poll() == 0 for member in self.present):
            self._over = True
            self.membership.withdraw()  # the others had left the loop before they heard of them
            self.returns.stop()
        return self._over

    def _reconnect(self) -> None:
        """Re-form a group whose connections broke, or that did not form, though no member is gone.

        Whoever waits for so long has heard of the newest epoch, and waits for the next one.
        """
        beats = [self._watch.beat_of(number) for number in self.membership.members]
        waiting = any(beat is not None and beat.doing == WAITING for beat in beats)
        waiting = waiting and self.membership.tries < FORMING_TRIES
        if self.reforms and self._hang_watch.all_wait and not self.membership.forming:
            self.membership.form_again()
        elif not self.reforms or not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()
        elif time.monotonic() - self._waiting_since > self._config.fault.heartbeat_seconds:
            self._waiting_since = None
            self.membership.form_again()

    def _stays(self, member: Member) -> RankFailure:
        text = f"{member.device} does not leave its step, while the others wait for it to form a group."
        beat = self._watch.beat_of(member.number)
        return RankFailure(member.number, "Hung", text, beat.step if beat else None, time=time.time())

    def _hung(self, one: Hung) -> RankFailure:
        text = (
            f"{one.stack.rstrip()}\n{one.member.device} hangs at step {one.step}, for {one.seconds:.1f} s by "
            f"now, in {one.place}"
        )
        self._say(text.splitlines()[-1])
        return RankFailure(one.member.number, "Hung", text, one.step, time=time.time())

    def _frozen(self, member: Member) -> RankFailure:
        beat = self._watch.beat_of(member.number)
        limit = self._config.fault.heartbeat_seconds
        text = f"It gave no sign of life, and did no work, for {limit:g} s (fault.heartbeat_seconds)."
        step = beat.step if beat is not None else None
        return RankFailure(member.number, "Frozen", text, step, time=time.time())

    def _tell_formed(self, report: Mapping[str, Any]) -> None:
        self.causes.clear()
        plan = self.membership.plan
        many = "device goes" if plan.world_size == 1 else "devices go"
        for loss in self.membership.unreported():
            self._say(
                f"{loss.device} was lost at step {loss.step} ({loss.kind}); {plan.world_size} {many} on, "
                f"{loss.recovered_seconds:.2f} s"
            )
        self.returns.formed(report.get("step"))


def _say(console: Console, text: str) -> None:
    console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _predicted_seconds(plan: Plan) -> float | None:
    """Return what a step is predicted to take, of devices that are not slower on purpose."""
    calibrated: float | None = (plan.calibration or {}).get("predicted_step_seconds")
    return None if plan.emulated else calibrated or plan.predicted_step_seconds

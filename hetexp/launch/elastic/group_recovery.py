"""Recovery from device failures in the launcher: it removes lost members, and restarts their devices."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from rich.console import Console

from hetexp.core.epoch import Departure, SignedStore
from hetexp.core.plan import Plan
from hetexp.launch.elastic.hang_detection import HangWatch, HungRank
from hetexp.launch.elastic.health import HealthMonitor
from hetexp.launch.elastic.heartbeat import WAITING
from hetexp.launch.elastic.membership import Membership, device_trouble
from hetexp.launch.elastic.respawn import Respawns
from hetexp.launch.processes.failure import RankFailure
from hetexp.launch.processes.hosts import is_here
from hetexp.launch.processes.members import Member
from hetexp.launch.terminal.lines import print_line
from hetexp.plan.replan import replan
from hetexp.plan.run_spec import RunSpec

NONE_HERE = "No device of this machine, where the run's folder is, is left."
FORMING_TRIES = 4
"""Number of epochs in a row whose group did not form, after which the members' own error ends the run."""


class GroupRecovery:
    """Keeps a running training going when members fail, and when devices join or leave.

    Args:
        store: the launcher's connection to the store.
        started: every process of the run; later ones are added to it.
    """

    def __init__(
        self, plan: Plan, spec: RunSpec, console: Console, store: SignedStore, started: list[Member]
    ) -> None:
        self._config, self._strategy = spec.config, spec.strategy
        config = spec.config
        self._started = started
        self.membership = Membership(plan, store)
        self._health = HealthMonitor(store, config.fault.heartbeat_seconds)
        self._hangs = HangWatch(self._health, _predicted_seconds(plan))
        self._waiting_since: float | None = None
        """Since when a member has waited for an epoch without a reason to publish one."""
        self.begun = self._finished_training = False
        self.causes: list[RankFailure] = []
        """Failures of the members that were removed since the last epoch whose group formed."""
        # No reference cycle: the port of the store must be free as soon as the run is deleted.
        self._say = partial(print_line, console, style="yellow")
        self.respawns = Respawns(self.membership, config, store, started, self._say)

    @property
    def reforms(self) -> bool:
        """Whether ranks re-form their group when a member goes."""
        able = self.membership.whole.reforms and self._strategy.reforms and not self.ignores_commands
        return self._config.fault.survive and able

    @cached_property
    def ignores_commands(self) -> str:
        """Why ranks take no commands while they train; empty if they do."""
        if self.membership.whole.measuring:
            return "Devices that are measured take no commands."
        if self.membership.whole.script is not None:
            return "A user's own script (hetexp launch) has a loop that hetexp cannot change."
        return self._strategy.ignores_commands()

    @property
    def may_start_again(self) -> bool:
        """Whether the run has begun to train, and goes on without lost devices."""
        return self.begun and self._config.fault.survive and not self.membership.whole.measuring

    @property
    def newest_step(self) -> int | None:
        """Most steps that any member has reported; `None` without a report."""
        beats = [self._health.beat_of(member.number) for member in self._started]
        steps = [beat.step for beat in beats if beat is not None and beat.step is not None]
        steps += [failure.step for failure in self.causes if failure.step is not None]
        return max(steps, default=None)

    @property
    def lost_members(self) -> set[int]:
        """Members whose devices failed since the last epoch whose group formed."""
        return {failure.rank for failure in self.causes}

    @property
    def present(self) -> list[Member]:
        """Members that train now, in the order of their ranks."""
        by_number = {member.number: member for member in self._started}
        return [by_number[number] for number in self.membership.members]

    def begin(self) -> None:
        """Note that the training has begun."""
        self.begun = True
        if self.reforms and self.membership.whole.world_size > 1:
            replan(self.membership.whole, [0])  # imports now what a loss needs later

    def remove_failed(self, failed: Mapping[Member, tuple[RankFailure, int]]) -> bool:
        """Remove members that have failed; return whether the others go on.

        Args:
            failed: member → failure and exit code.
        """
        lost = _device_failures(failed)
        return self.begun and len(lost) == len(failed) and self.remove(lost)

    def add_causes(self, failed: Mapping[Member, tuple[RankFailure, int]]) -> None:
        """Count failed members as lost devices if no loss is known yet, and all failures are devices'.

        A rank may lose its peer before the launcher notices the failure of that peer.

        Args:
            failed: member → failure and exit code.
        """
        lost = _device_failures(failed)
        if self.begun and not self.causes and len(lost) == len(failed):
            self.causes += [failure for failure in lost.values() if not failure.peer_lost]

    def remove(self, lost: Mapping[Member, RankFailure]) -> bool:
        """Kill lost members and publish an epoch without them; return whether the others go on.

        Args:
            lost: member → its failure, whose `kind` the summary shows.
        """
        self.causes += [failure for failure in lost.values() if not failure.peer_lost]
        for member in lost:
            member.kill()  # closes its sockets and releases its locks, so that waiting ranks notice
        if not self.reforms:
            return False
        left = [member for member in self.present if member not in lost]
        if len(left) < self._config.fault.min_devices or not left:
            return False
        if not is_here(left[0].device):  # the first rank writes the run's folder
            self._say(f"The run does not go on. {NONE_HERE}")
            return False
        if any(member.process.poll() is not None for member in left):
            return False  # the others have finished, or fail as well
        now = time.time()
        departures = {
            member.number: Departure(member.number, member.device.id, failure.kind, now)
            for member, failure in lost.items()
        }
        self.membership.leave(departures, {failure.rank: failure.step for failure in lost.values()})
        for member in lost:
            self.respawns.lost(member.number)
            self.respawns.after_loss(member.device)
        return True

    def poll(self) -> bool:
        """Handle losses and joins since the last call; return whether the run goes on."""
        if not self.begun or not self._config.fault.survive or self.membership.whole.measuring:
            return True
        if self._finished():
            return True
        report = self.membership.take_report()
        if report is not None:
            self._report_formed(report)
        self.respawns.poll()
        if self.reforms:
            self.respawns.keep_spare()
        lost = {member: self._frozen_failure(member) for member in self._health.frozen(self.present)}
        if not lost and not self.membership.forming:
            lost = {hung.member: self._hung_failure(hung) for hung in self._hangs.find_hung(self.present)}
        if not lost:
            self._reconnect()
        if not lost and self.membership.forming_seconds > self._hangs.bound_seconds:
            lost = {member: self._stuck_failure(member) for member in self._hangs.overdue(self.present)}
        return not lost or self.remove(lost)

    def _finished(self) -> bool:
        """Return whether a member has done the last step. Afterwards no member is lost, and none joins."""
        if not self._finished_training and any(member.process.poll() == 0 for member in self.present):
            self._finished_training = True
            self.membership.withdraw()  # the others left the training loop without them
            self.respawns.stop()
        return self._finished_training

    def _reconnect(self) -> None:
        """Re-form a group whose connections broke, or that did not form, although all members live.

        A member that waits longer than a heartbeat's limit knows the newest epoch, and needs the next one.
        """
        beats = [self._health.beat_of(number) for number in self.membership.members]
        waiting = any(beat is not None and beat.doing == WAITING for beat in beats)
        waiting = waiting and self.membership.tries < FORMING_TRIES
        if self.reforms and self._hangs.all_wait and not self.membership.forming:
            self.membership.form_again()
        elif not self.reforms or not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()
        elif time.monotonic() - self._waiting_since > self._config.fault.heartbeat_seconds:
            self._waiting_since = None
            self.membership.form_again()

    def _stuck_failure(self, member: Member) -> RankFailure:
        text = f"{member.device} does not leave its step, while the others wait for it to form a group."
        return RankFailure(member.number, "Hung", text, self._step_of(member), time=time.time())

    def _hung_failure(self, hung: HungRank) -> RankFailure:
        where = f"{hung.member.device} hangs at step {hung.step}, for {hung.seconds:.1f} s, in {hung.place}"
        self._say(where)
        text = f"{hung.stack.rstrip()}\n{where}"
        return RankFailure(hung.member.number, "Hung", text, hung.step, time=time.time())

    def _frozen_failure(self, member: Member) -> RankFailure:
        limit = self._config.fault.heartbeat_seconds
        text = f"It sent no heartbeat, and did no work, for {limit:g} s (fault.heartbeat_seconds)."
        return RankFailure(member.number, "Frozen", text, self._step_of(member), time=time.time())

    def _step_of(self, member: Member) -> int | None:
        beat = self._health.beat_of(member.number)
        return beat.step if beat is not None else None

    def _report_formed(self, report: Mapping[str, Any]) -> None:
        self.causes.clear()
        plan = self.membership.plan
        many = "device goes" if plan.world_size == 1 else "devices go"
        for loss in self.membership.unreported():
            self._say(
                f"{loss.device} was lost at step {loss.step} ({loss.kind}); {plan.world_size} {many} on, "
                f"{loss.recovered_seconds:.2f} s"
            )
        self.respawns.formed(report.get("step"))


def _device_failures(failed: Mapping[Member, tuple[RankFailure, int]]) -> dict[Member, RankFailure]:
    """Return the failures of devices, with their kind; errors that every rank would hit are left out."""
    kinds = {member: device_trouble(failure, code) for member, (failure, code) in failed.items()}
    return {
        member: replace(failed[member][0], kind=kind) for member, kind in kinds.items() if kind is not None
    }


def _predicted_seconds(plan: Plan) -> float | None:
    """Return the predicted seconds of a step; `None` with emulated devices, which are slower on purpose."""
    calibrated: float | None = (plan.calibration or {}).get("predicted_step_seconds")
    return None if plan.emulated else calibrated or plan.predicted_step_seconds

"""How one rank leaves its group and forms the next one when the members of a training change.

A rank that loses another one drops its step and waits until the launcher names the members of the next epoch
(`hetexp/core/epoch.py`). The members form a group and report their progress. A rank may have died between the
exchange of gradients and the update, so that some ranks have done the step and others have not. The newest
step counts, since all would have done it. A rank that has its state gives it to ranks that are behind or new
(`hetexp/training/recovery/handover.py`). Then all members train on the next global batch.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hetexp.comm.connections.lost import is_peer_lost
from hetexp.comm.connections.revocation import Revocation
from hetexp.comm.connections.sockets import shut_all
from hetexp.comm.connections.watched_store import WatchedStore, another_connection
from hetexp.comm.rendezvous import all_gather_json
from hetexp.core.epoch import Epoch, SignedStore, left_key, plan_key, prepared_key, reformed_key, revoked_key
from hetexp.core.errors import HandshakeError, HetexpError, PeerLostError, SetupError
from hetexp.core.lines import last_rows
from hetexp.core.plan import Plan
from hetexp.training.group import versions
from hetexp.training.recovery.carried import Carried
from hetexp.training.recovery.handover import receive_state, send_state
from hetexp.training.recovery.rank_commands import RankCommands
from hetexp.training.recovery.watch import HURRIED_SECONDS, LauncherNews
from hetexp.training.wiring import start_loggers

if TYPE_CHECKING:
    from hetexp.training.loop import Training

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02
"""Pause between two looks at whether a group has ended."""
LINES = 2**18
"""Bytes at the end of `metrics.jsonl` that contain the lines of the last step."""


class DismissedError(HetexpError):
    """The training goes on without this rank, as the user has asked."""


class RankRecovery:
    """Lets a rank outlive other ranks, and answer the user's commands.

    Args:
        store: the launcher's.
        member: this process's number.
        secret: by which the run's processes sign (`SignedStore`).
    """

    def __init__(self, store: dist.Store, member: int, secret: str) -> None:
        self.member = member
        self._launcher, self._secret = store, secret
        self._signed = self._aside = SignedStore(store, secret)
        """The launcher's store; `_aside` is a connection for the threads that revoke groups."""
        self._watch = LauncherNews(store, secret, self._broken)
        self.requests = RankCommands(self._signed)
        self.epoch = 0
        """Number of the epoch whose group this rank is in, or is about to form."""
        self._forming = False
        self.store = WatchedStore(store, "", self._obsolete)
        """The group's store; its waits end if a member is gone."""
        self._members: tuple[int, ...] = ()
        """Members of the group; empty: those of the run's start."""

    def start(self) -> None:
        """Start watching for epochs and requests."""
        self._aside = SignedStore(another_connection(self._launcher), self._secret)
        self._watch.start()

    def stop(self) -> None:
        """Stop watching, in a process that goes on afterwards."""
        self._watch.stop()

    def _obsolete(self) -> bool:
        """Return whether the group of this epoch can no longer form or work."""
        if self._forming:  # other ranks may be in a newer group already
            return self._watch.epoch > self.epoch
        return self._watch.broken_since(self.epoch)

    # ------------------------------------------------------------ at the end of a step

    def notices(self) -> tuple[int, int]:
        return self._watch.epoch, self._watch.request

    def due(self, noticed: tuple[int, int]) -> bool:
        return noticed[0] > self.epoch

    def serve(self, training: Training, noticed: tuple[int, int]) -> None:
        if noticed[1] > self.requests.handled:
            self.requests.serve(training, noticed[1])

    # ------------------------------------------------------------ another group

    def rejoin(self, training: Training, error: Exception | None = None) -> None:
        state = training.state
        lost = error is not None
        if error is not None and not (state.survives and self._of_a_loss(error)):
            raise error
        if error is not None:
            log.warning("A member of the group is lost (%s).", str(error).partition("\n")[0])
        began = time.monotonic()
        # Before this rank waits, so that the others learn at once that it has left.
        state.doing = "waiting"
        training.carried = Carried.of(state)
        while True:
            epoch = self._left_for(training, error)
            if self.member not in epoch.members:
                raise DismissedError(f"the training goes on without member {self.member}")
            try:
                self._join(training, epoch, lost, began)
            except Exception as failed:
                if not (isinstance(failed, (HandshakeError, SetupError)) or self._of_a_loss(failed)):
                    raise
                log.warning("The group of epoch %d did not form: %s", epoch.number, failed)
                error, lost = failed, True
                state.doing = "waiting"
                continue
            return

    def _of_a_loss(self, error: Exception) -> bool:
        """Return whether an error follows from the loss of a rank.

        Any does in a group that is given up, whose collectives return wrong numbers.
        """
        return is_peer_lost(error) or (self.store.revocation.native and self.store.revocation.revoked)

    def _left_for(self, training: Training, error: Exception | None) -> Epoch:
        """Leave the group and return the next epoch.

        Raises:
            Exception: the error that broke the group, if no epoch comes, or a collective cannot be ended.
        """
        revocation, limit = self.store.revocation, training.state.config.comm.timeout_seconds
        if revocation.native:
            began = time.monotonic()
            revocation.leave()
            if error is None:
                self._end_together(training)
            if not self._has_ended(training, revocation, limit):
                raise error or PeerLostError("the collectives of the last group did not end")
            log.info("The group's collectives have ended after %.2f s.", time.monotonic() - began)
        training.state.engine.leave()
        return self._next_epoch(training, error)

    def _has_ended(self, training: Training, revocation: Revocation, seconds: float) -> bool:
        """Return whether the group's collectives end within this time."""
        deadline = time.monotonic() + seconds
        while not revocation.wait_for_abort(_LOOK_SECONDS) and time.monotonic() < deadline:
            if self._watch.broken_since(self.epoch):  # the launcher need not publish another epoch
                training.state.doing = "leaving"
            if revocation.failed:
                return False
        return revocation.aborted

    def _end_together(self, training: Training) -> None:
        """End the group's collectives after its last step, once no member needs another's messages."""
        members = self._members or tuple(range(training.state.plan.world_size))
        self._signed.write(left_key(self.epoch, self.member), "")
        keys, pause = [left_key(self.epoch, member) for member in members], threading.Event()
        while any(self._signed.read(key) is None for key in keys):
            if self._watch.broken_since(self.epoch):  # the thread of that epoch ends the collectives
                return
            pause.wait(HURRIED_SECONDS)
        self.store.revocation.abort()

    def _broken(self, epoch: Epoch) -> None:
        """End all waits for lost members; the thread that watches calls it."""
        shut_all()
        revocation = self.store.revocation
        threading.Thread(target=self._revoke, args=(revocation, epoch), name="revoke", daemon=True).start()

    def _revoke(self, revocation: Revocation, epoch: Epoch) -> None:
        """Give up the group before an urgent epoch, and end its collectives once all have given it up."""
        revocation.revoke()
        store, pause = self._aside, threading.Event()
        with suppress(RuntimeError):  # the launcher is gone, and this process about to follow it
            store.write(revoked_key(epoch.number, self.member), "")
            if not revocation.native:
                return
            while True:
                newest = self._watch.members if self._watch.epoch > epoch.number else epoch.members
                living = set(epoch.members) & set(newest)
                if all(store.read(revoked_key(epoch.number, member)) is not None for member in living):
                    break
                pause.wait(HURRIED_SECONDS)
            revocation.abort()

    def _next_epoch(self, training: Training, error: Exception | None) -> Epoch:
        """Return the next epoch; raise the error that broke the present one if none comes."""
        limit = training.state.config.comm.timeout_seconds
        number = self.epoch
        while True:
            epoch = self._watch.newest_after(number, limit)
            if epoch is None and error is not None:
                raise error
            if epoch is not None and (training.ready or self.member in epoch.members):
                return epoch
            number = self.epoch if epoch is None else epoch.number  # an epoch without this newcomer

    def _join(self, training: Training, epoch: Epoch, lost: bool, began: float) -> None:
        state = training.state
        state.doing, self._forming, self.epoch = "forming", True, epoch.number
        self.store = store = WatchedStore(self._launcher, epoch.topic, self._obsolete)
        self._members = epoch.members
        if self._watch.broken_since(epoch.number):
            raise PeerLostError("the members of this training have changed")
        if (text := self._signed.read(plan_key(epoch.number))) is None:
            raise SetupError(f"`{plan_key(epoch.number)}` must be in the run's store, but is not.")
        plan = Plan.from_json(text).placed_as(state.plan)
        rank = epoch.members.index(self.member)
        donor = -1

        def agree_on_state() -> None:
            nonlocal donor
            donor = self._agree(training, store)

        state.engine.join(plan, rank, store, agree_on_state)
        state.communicator.barrier()
        self._forming = False
        self._take_loggers(training)
        seconds = time.monotonic() - began
        if rank == 0:
            message = {
                "step": training.progress.step,
                "donor": epoch.members[donor],
                "seconds": seconds,
                "steps_lost": 0,
                "way": "in process",
            }
            self._signed.write(reformed_key(epoch.number), json.dumps(message))
            who = ", ".join(device.id for device in plan.devices)
            log.info("epoch %d: %s train from step %d on", epoch.number, who, training.progress.step)

    def _agree(self, training: Training, store: dist.Store) -> int:
        """Bring all ranks to the state of the newest step; return the donor, the first rank that had it."""
        state, limit = training.state, training.state.config.comm.timeout_seconds
        local: dict[str, Any] = {
            "step": training.progress.step if training.ready else -1,
            "step_ended": training.step_ended,
            "evaluated": training.evaluated_at == training.progress.step,
            "saved": training.saved_at == training.progress.step,
            "written": written(training),
            "runs on": versions(),
        }
        reports = all_gather_json(store, "state", state.rank, state.plan.world_size, local, limit)
        newest = max(report["step"] for report in reports)
        if newest < 0:
            raise SetupError("none of the members has a state to go on from.")
        ahead = [report for report in reports if report["step"] == newest]
        donor, behind = reports.index(ahead[0]), len(ahead) < len(reports)
        # All ranks log, evaluate and save again unless all have done so. The rank that writes may have died
        # when the others had sent their part of a line.
        complete = all(report["written"] for report in ahead)
        step_ended = complete and all(report["step_ended"] for report in ahead)
        if state.rank == donor:
            send_state(training, store, step_ended, behind, self.requests.handled)
        self.requests.handled = receive_state(training, store, donor, local["step"] < newest, behind)
        state.run_on = tuple(report["runs on"] for report in reports)
        training.step_ended = step_ended
        if not complete:
            training.logged_at = -1
        if not complete or not all(report["evaluated"] for report in ahead):
            training.evaluated_at = -1
        if not all(report["saved"] for report in ahead):
            training.saved_at = -1
        training.ready = True
        return donor

    def _take_loggers(self, training: Training) -> None:
        """Open the loggers on rank 0, and close those of a rank that was rank 0 before."""
        state = training.state
        if state.rank == 0:
            training.lines = written_lines(Path(state.plan.run_dir) / "metrics.jsonl")
            if not state.loggers:
                state.loggers = start_loggers(state)
        elif state.loggers:
            for logger in state.loggers:
                logger.finish({}, 0)
            state.loggers = ()

    # ------------------------------------------------------------ a newcomer

    def prepare(self) -> None:
        """Report to the launcher that this process can join."""
        self._signed.write(prepared_key(self.member), "1")


def written(training: Training) -> bool:
    """Return whether the metrics file has the lines of the last step to which this rank has contributed."""
    step, due = training.progress.step, set()
    if training.logged_at == step:
        due.add(("train", step))
    if training.evaluated_at == step and training.outcome.evaluation:
        due.add(("eval", step))
    return not due or due <= written_lines(Path(training.state.plan.run_dir) / "metrics.jsonl")


def written_lines(path: Path) -> set[tuple[str, int]]:
    """Return the lines of the last steps in a metrics file: `train` or `eval`, and the step."""
    lines = set()
    for row in last_rows(path, LINES):
        kinds = {str(name).partition("/")[0] for name in row}
        lines |= {(kind, row["step"]) for kind in kinds & {"train", "eval"}}
    return lines

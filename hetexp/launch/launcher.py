"""Runs a plan: hosts the store, starts one rank for each device, follows the ranks, and ends them all."""

from __future__ import annotations

import json
import math
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from hetexp.core import start_up
from hetexp.core.device import DeviceSpec
from hetexp.core.epoch import SignedStore
from hetexp.core.errors import RunFailedError
from hetexp.core.files import ending_when_full, write_json
from hetexp.core.plan import Plan
from hetexp.core.summary import blank_summary
from hetexp.hardware.backend import backend_class
from hetexp.hardware.detection.inventory import detect
from hetexp.hardware.detection.lease import Leases
from hetexp.launch.commands import CommandRunner
from hetexp.launch.control import ControlServer
from hetexp.launch.elastic.group_recovery import NONE_HERE, GroupRecovery
from hetexp.launch.elastic.health import UNSEEN
from hetexp.launch.elastic.restart import Restart, Restarts, keep_faults, newest_checkpoint
from hetexp.launch.elastic.stopped import StoppedWatch
from hetexp.launch.preflight import check_machine
from hetexp.launch.processes.failure import RankFailure, first_cause, read_failure, tail
from hetexp.launch.processes.hosts import all_there, is_here
from hetexp.launch.processes.members import Member, end_all, environment_of, pause_for, start_member
from hetexp.launch.processes.store import bind, host_store
from hetexp.launch.requests import Requests
from hetexp.launch.terminal.diagrams import diagrams
from hetexp.launch.terminal.display import MEASURING, Display, show_plan, show_summary
from hetexp.launch.terminal.lines import print_line
from hetexp.monitor.follow import Follower, followed
from hetexp.plan.run_spec import RunSpec

POLL_SECONDS = 0.05
CALIBRATION = "calibration.json"
"""Result of ranks that only measure their devices, in the folder of the run."""
READY = "ready"
"""Store key of the number of steps, which rank 0 sets once all ranks agree."""


def launch(plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
    """Run the plan to its end.

    Returns:
        The summary of a completed run, as in `summary.json`.

    Raises:
        ConfigError: `launch.port` is taken.
        SetupError: the machine is not ready (see `hetexp.launch.preflight`), another run holds a card, or a
            rank cannot be started.
        RunFailedError: a rank failed (the screen and the summary have the reason), a signal came, or the
            disk is full.
    """
    show_plan(plan, console)
    with ending_when_full(Path(plan.run_dir)):
        summary, caught, details = _run_ranks(plan, spec, console)
    if summary["status"] == "completed":
        show_summary(summary, Path(plan.run_dir), console)
        return summary
    _raise(summary, caught, details, console)


def measure(plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
    """Let the ranks of a plan measure their devices, in the folder `calibration` of the run.

    Returns:
        The result of `hetexp.training.measuring.calibrate.calibrate` on rank 0.

    Raises:
        ConfigError, SetupError, RunFailedError: as `launch`.
    """
    plan = replace(plan, run_dir=str(Path(plan.run_dir) / "calibration"), measuring=True)
    with ending_when_full(Path(plan.run_dir)):
        summary, caught, details = _run_ranks(plan, spec, console)
    path = Path(plan.run_dir) / CALIBRATION
    if caught or not path.exists():
        _raise(summary, caught, details, console)
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return measured


def _run_ranks(
    plan: Plan, spec: RunSpec, console: Console
) -> tuple[dict[str, Any], list[signal.Signals], str]:
    """Start one rank for each device, follow the ranks to their end, and restart them after losses.

    Returns:
        The summary, the signals that came, and the details of a failure's first cause.
    """
    config = spec.config
    check_machine(plan, config, [environment_of(plan, rank) for rank in range(plan.world_size)])
    listener = bind(plan.store_host, config.launch.port)
    plan = replace(plan, store_port=listener.getsockname()[1])
    run_dir = Path(plan.run_dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    plan_path = run_dir / "plan.json"
    plan.write(plan_path)
    # A shared card is not leased, and each other machine leases its own cards.
    local_devices = [device for device in plan.all_devices if is_here(device)]
    leases = Leases([] if config.hardware.share_devices else local_devices, plan.run_dir)
    restarts, before = Restarts(plan, spec, partial(measure, console=console)), None
    with (
        leases,
        ControlServer(run_dir) as server,
        _signals() as caught,
        diagrams(plan, config, console),
        followed(plan, config) as follower,
    ):
        while True:
            run = _Run(plan, spec, console, host_store(listener), before)
            run.accept_commands(server, leases)
            run.follower = follower
            try:
                run.start(plan_path)
                start_up.ended("processes started")
                run.signed.write(start_up.KEY, start_up.own())
                run.follow(caught)
            finally:
                run.end()
            if plan.measuring and not run.failures and not caught and (run_dir / CALIBRATION).exists():
                start_up.add(run.signed.read(start_up.KEY) or "[]")
                return blank_summary(plan, "completed"), caught, ""
            restart = run.restart(restarts, caught) if not caught else None
            if restart is None:
                return run.conclude(caught), caught, run.details
            before, plan, spec = run, restart.plan, restart.spec
            listener = bind(plan.store_host, 0)  # the previous store still has the configured port
            plan = replace(plan, store_port=listener.getsockname()[1])
            plan.write(plan_path)


def _raise(summary: dict[str, Any], caught: list[signal.Signals], details: str, console: Console) -> NoReturn:
    if summary["status"] == "interrupted" and summary["checkpoint"] is not None:
        print_line(console, f"Its newest checkpoint, to go on from with resume=: {summary['checkpoint']}")
    if caught:
        console.print(f"Stopped by {caught[0].name}; every rank has ended.", style="bold yellow")
        raise RunFailedError(f"stopped by {caught[0].name}", exit_code=128 + caught[0], shown=True)
    raise RunFailedError(summary["error"], details=details, shown=bool(details))


class _Run:
    """The members of one run, from their start to their end."""

    def __init__(
        self, plan: Plan, spec: RunSpec, console: Console, store: Any, before: _Run | None = None
    ) -> None:
        self.plan, self.spec, self.console, self.store = plan, spec, console, store
        self.config = config = spec.config
        self.signed = SignedStore(store, secrets.token_hex(32))
        self.started: list[Member] = []
        self.recovery = GroupRecovery(plan, spec, console, self.signed, self.started)
        self._starts_again = before is not None
        if before is not None:
            self.recovery.membership.take_over(before.recovery.membership)
            keep_faults(len(config.fault.events), before.store, store)
        self.failures: list[RankFailure] = []
        """Their `rank` is the member's number, which at the start equals its rank."""
        self.details = ""
        self.follower = Follower()
        self._ready = False
        self._requests = Requests(self.signed)
        self._commands: CommandRunner | None = None
        self._stopped = StoppedWatch(config.fault.heartbeat_seconds)
        self._stopped_at_end: set[Member] = set()
        """Members that SIGSTOP had stopped after the others had finished."""
        self._stop_by: float | None = None
        """Deadline for the ranks to end after a signal, by the monotonic clock."""

    def accept_commands(self, server: ControlServer, leases: Leases) -> None:
        """Accept the user's commands while the run trains."""
        shared = self.config.hardware.share_devices
        self._commands = CommandRunner(
            server, self.recovery, self._requests, self.spec, None if shared else leases
        )

    def start(self, plan_path: Path) -> None:
        """Start every rank."""
        for rank in range(self.plan.world_size):
            method, secret = self.config.launch.start_method, self.signed.secret
            self.started.append(start_member(self.plan, plan_path, rank, method, secret))

    def follow(self, caught: list[signal.Signals]) -> None:
        """Return when the run is over.

        All ranks have ended, the others cannot go on after a failure, the start took too long, or a signal
        came.
        """
        deadline = time.monotonic() + self.config.launch.timeout_seconds
        with Display(self.plan, self.console, self._starts_again) as display:
            while not caught or self._may_finish(caught):
                members = self.recovery.present
                pause_for(members, POLL_SECONDS)
                codes = {member: member.process.poll() for member in members}
                codes |= dict.fromkeys(self._stopped_at_end & codes.keys(), 0)
                failed = {member: code for member, code in codes.items() if code}
                if failed and not self._continues_without(failed):
                    self._gather_failures()
                    return
                if not self._ready:
                    self._check_ready(display)
                if self.plan.measuring:
                    display.measuring(self._stages_measured())
                if not self._ready or 0 in codes.values():
                    self._end_stopped([member for member, code in codes.items() if code is None])
                    if self.failures:
                        return
                if 0 in codes.values() and not self._ready:
                    self._gather_failures()
                    return
                if all(code == 0 for code in codes.values()):
                    return
                if not self._ready and time.monotonic() > deadline:
                    self.failures += self._never_ready()
                    return
                if not self.recovery.poll():
                    self._gather_failures()
                    return
                if self._commands is not None:
                    self._commands.poll()
                display.follow(self.recovery.membership.plan, self.recovery.present[0].log_path)
                display.update()

    def _may_finish(self, caught: list[signal.Signals]) -> bool:
        """Let the ranks save a last checkpoint and end; return whether they still have time for it.

        Args:
            caught: the signals that came; the second signal ends all ranks at once.
        """
        if len(caught) > 1 or not self.recovery.begun or self.recovery.ignores_commands:
            return False
        if self._stop_by is None:
            limit = self.config.fault.stop_seconds
            self._stop_by = time.monotonic() + limit
            self._requests.send("checkpoint")
            self._requests.send("stop")
            self._print(
                f"{caught[0].name}: the run saves a checkpoint and ends, within {limit:g} s "
                "(fault.stop_seconds); a second signal ends it at once."
            )
        return time.monotonic() < self._stop_by

    def _continues_without(self, failed: dict[Member, int]) -> bool:
        """Remove failed members; return whether the others go on.

        Args:
            failed: member → exit code.
        """
        failures = {member: (_failure_of(member, code), code) for member, code in failed.items()}
        return self.recovery.remove_failed(failures)

    def _check_ready(self, display: Display) -> None:
        if (text := self.signed.read(READY)) is not None:
            self._ready = True
            self.recovery.begin()
            self.recovery.membership.recovered()
            steps = int(text)
            display.total_steps(steps)
            self.follower.ready(steps)

    def _stages_measured(self) -> int:
        """Return how many stages of a measurement all ranks have ended."""
        ranks = range(self.plan.world_size)
        ended = (self.store.check([f"{topic}/{rank}" for rank in ranks]) for _, topic in MEASURING)
        return sum(1 for _ in takewhile(bool, ended))

    def _end_stopped(self, members: list[Member]) -> None:
        """End members that SIGSTOP has stopped while no heartbeats are due.

        Before training this is a failure. After training the member is killed.
        """
        limit = self.config.fault.heartbeat_seconds
        for member, seconds in self._stopped.look(members).items():
            writes = member is self.recovery.present[0]  # the summary, last of all
            if self._ready and seconds > limit * (UNSEEN if writes else 1.0):
                member.kill()
                self._stopped_at_end.add(member)
            elif not self._ready and seconds > limit:
                text = f"was stopped before training, for {limit:g} s (fault.heartbeat_seconds)."
                self.failures.append(self._failure_with_log(member, "Frozen", text))

    def _never_ready(self) -> list[RankFailure]:
        """Return the failures of the ranks that kept the others from training, with how far each came."""
        limit, address = self.config.launch.timeout_seconds, f"{self.plan.store_host}:{self.plan.store_port}"
        within = f"within {limit:g} s (launch.timeout_seconds)"
        stages = {
            "hello": f"did not connect to {address} {within}.",
            "handshake": f"connected to {address} but did not build its data and model {within}.",
        }
        for topic, text in stages.items():
            late = [member for member in self.started if not self.store.check([f"{topic}/{member.number}"])]
            if late:
                return [self._failure_with_log(member, "StartTimeout", text) for member in late]
        text = f"agreed with all others at {address}, but training did not start {within}."
        return [self._failure_with_log(self.started[0], "StartTimeout", text)]

    def _gather_failures(self) -> None:
        """Wait for ranks that are about to fail as well, because the first cause may end later."""
        members = self.recovery.present
        deadline = time.monotonic() + self._grace_seconds
        for member in members:
            member.process.wait(max(deadline - time.monotonic(), 0.0))
        codes = {member: member.process.poll() for member in members}
        failed = {member: (_failure_of(member, code), code) for member, code in codes.items() if code}
        self.recovery.add_causes(failed)
        causes = {failure.rank: failure for failure in self.recovery.causes}
        self.failures += [causes.pop(failure.rank, failure) for failure, _ in failed.values()]
        self.failures += causes.values()
        if all(failure.peer_lost for failure in self.failures):
            self.failures += self._unexplained(codes)

    def _unexplained(self, codes: dict[Member, int | None]) -> list[RankFailure]:
        """Return the failures of ranks without a report, if no other rank gave a reason."""
        ended = [member for member, code in codes.items() if code == 0]
        if ended:
            text = "ended as if it had finished, while the others had not."
            return [self._failure_with_log(member, "EndedEarly", text) for member in ended]
        limit = self.config.comm.timeout_seconds
        text = f"did not answer the others within {limit:g} s (comm.timeout_seconds)."
        left = [member for member, code in codes.items() if code is None]
        return [self._failure_with_log(member, "NotResponding", text) for member in left]

    def _failure_with_log(self, member: Member, kind: str, text: str) -> RankFailure:
        end = tail(member.log_path)
        who = f"rank {member.number}, {member.device},"
        return RankFailure(member.number, kind, f"End of its log:\n{end}\n{who} {text}", time=time.time())

    @property
    def _grace_seconds(self) -> float:
        """Seconds for the ranks to end by themselves: at most one if a lost device is known as the cause."""
        lost = self.recovery.lost_members or any(failure.kind == "Frozen" for failure in self.failures)
        return min(self.config.launch.grace_seconds, 1.0 if lost else math.inf)

    def end(self) -> None:
        """End every process of the run: first by SIGTERM, then by SIGKILL; return when none is left."""
        self.recovery.respawns.close()
        end_all(self.started, self._grace_seconds)
        if self._commands is not None:
            self._commands.close()

    def restart(self, restarts: Restarts, caught: list[signal.Signals]) -> Restart | None:
        """Return how the run starts again after it has lost devices; `None`: it is over.

        Args:
            caught: the signals that came; a signal ends the wait for another machine.
        """
        recovery = self.recovery
        causes = [failure for failure in self.failures if not failure.peer_lost]
        silent = {failure.rank for failure in causes if failure.kind == "NotResponding"}
        lost = {failure.rank: failure for failure in causes if failure.rank in recovery.lost_members | silent}
        if not causes or len(lost) < len(causes) or not recovery.may_start_again or self._stop_by is not None:
            return None
        restart = restarts.after(recovery.membership.whole, [self._device(number) for number in lost])
        if isinstance(restart, str):
            self._print(f"The run does not start again: {restart}")
            return None
        if not is_here(restart.plan.devices[0]):
            self._print(f"The run does not start again. {NONE_HERE}")
            return None
        if not all_there(restart.plan.devices, lambda: bool(caught)):
            self._print("The run does not start again without them.")
            return None
        step = recovery.newest_step
        names = ", ".join(f"{self._device(number).id} ({failure.kind})" for number, failure in lost.items())
        devices = ", ".join(device.id for device in restart.plan.all_devices)
        start = "starts" if len(restart.plan.all_devices) == 1 else "start"
        self._print(f"{names} was lost at step {step}; {devices} {start} again from step {restart.step}.")
        losses = [(number, self._device(number).id, failure) for number, failure in lost.items()]
        recovery.membership.ended(losses, step, restart.step)
        threading.Event().wait(restart.pause_seconds)
        return restart

    @property
    def _stopped_by_user(self) -> str:
        """The summary's error if the user has stopped the run; empty otherwise."""
        stopped = self._commands is not None and self._commands.stopped
        return "stopped by hetexp control" if stopped else ""

    def conclude(self, caught: list[signal.Signals]) -> dict[str, Any]:
        """Return the summary of rank 0, or write one with the reason of the failure."""
        path = Path(self.plan.run_dir) / "summary.json"
        members = {loss.member for loss in self.recovery.membership.losses}
        losses = [loss.to_dict() for loss in self.recovery.membership.losses]
        stopped = f"stopped by {caught[0].name}" if caught else self._stopped_by_user
        if not self.failures and path.exists():
            done: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            done["failures"] = losses + done["failures"]
            if stopped:
                done |= {"status": "interrupted", "error": stopped}
            if losses or stopped:
                self._write_summary(path, done)
            return done
        summary = blank_summary(self.plan, "interrupted" if stopped else "failed")
        summary["failures"] = losses
        if stopped:
            summary["error"] = stopped
        else:
            if not self.failures:
                first = self.recovery.present[0]
                self.failures.append(self._failure_with_log(first, "NoSummary", "ended without a summary."))
            cause = first_cause(self.failures)
            summary["error"] = self._print_cause(cause)
            summary["failures"] = losses + [
                {
                    "step": failure.step,
                    "device": self._device(failure.rank).id,
                    "kind": failure.kind,
                    "recovered_s": None,
                    "steps_lost": None,
                }
                for failure in sorted(self.failures, key=lambda f: f.time)
                if failure.rank not in members
            ]
        summary["checkpoint"] = newest_checkpoint(Path(self.plan.run_dir))
        self._write_summary(path, summary)
        return summary

    def _write_summary(self, path: Path, summary: dict[str, Any]) -> None:
        try:
            write_json(path, summary)
        except OSError as error:  # the disk may be what ended the run
            self._print(f"{path} could not be written: {error.strerror}.")

    def _print_cause(self, cause: RankFailure) -> str:
        """Print the first cause with its rank and device, and return it as one line."""
        device = self._device(cause.rank)
        at = "" if cause.step is None else f" at step {cause.step}"
        self.console.rule(f"rank {cause.rank}, {device}, failed{at}", style="bold red")
        self._print(cause.message)
        self.details = cause.message
        others = [failure for failure in self.failures if failure is not cause]
        if others:
            ranks = ", ".join(f"rank {f.rank} ({'lost a peer' if f.peer_lost else f.kind})" for f in others)
            self.console.print(f"Followed by: {ranks}.", highlight=False)
        self._print(f"Logs of all ranks: {Path(self.plan.run_dir) / 'logs'}")
        state = card_state(device)
        if state is not None:
            self._print(f"{device} is {state}. It is not chosen again while that is so.")
        if device.python is not None:
            self._print(f"Its interpreter: {device.python}")
        return f"rank {cause.rank}, {device}, failed{at}: {cause.reason}"

    def _print(self, text: str) -> None:
        print_line(self.console, text)

    def _device(self, number: int) -> DeviceSpec:
        """Return the device of a member."""
        devices = dict(enumerate(self.plan.devices))
        return (devices | {member.number: member.device for member in self.started})[number]


def _failure_of(member: Member, exit_code: int) -> RankFailure:
    """Return why a member failed."""
    return replace(read_failure(member.log_path, member.number, exit_code), rank=member.number)


def card_state(device: DeviceSpec) -> str | None:
    """Return what is wrong with a real card; `None` if its driver reports nothing."""
    if backend_class(device.backend).computes_on_cpu or not is_here(device):
        return None
    for card in detect(builds=[]).cards:
        same_uuid = device.uuid is not None and card.spec.uuid == device.uuid
        # A lost driver has no UUID, and instances share their card's address.
        if same_uuid or (card.spec.uuid is None and device.pci is not None and card.spec.pci == device.pci):
            return f"lost ({card.lost})" if card.lost is not None else card.undriven
    return "no longer in the machine's list of cards"


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of ending by them.

    A signal that was ignored before (as SIGHUP under nohup) stays ignored.
    """
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    ending = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    heard = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]
    before = {s: signal.signal(s, lambda number, _: caught.append(signal.Signals(number))) for s in heard}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Runs a plan: hosts the store, starts one rank a device, follows them, and ends everything it started."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from hetexp.checkpoint.manifest import find_checkpoint
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import HetexpError, RunFailedError
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
from hetexp.launch.elastic.restart import Again, Restarts, keep_faults
from hetexp.launch.elastic.stopped import StoppedWatch
from hetexp.launch.preflight import check_machine
from hetexp.launch.processes.failure import RankFailure, first_cause, read_failure, tail
from hetexp.launch.processes.hosts import all_there, is_here
from hetexp.launch.processes.members import Member, end_all, environment_of, pause_for, start_member
from hetexp.launch.processes.store import bind, host_store
from hetexp.launch.requests import Requests
from hetexp.launch.terminal.diagrams import diagrams
from hetexp.launch.terminal.display import Display, show_plan, show_summary
from hetexp.monitor.follow import Follower, followed
from hetexp.plan.run_spec import RunSpec

POLL_SECONDS = 0.05
CALIBRATION = "calibration.json"
"""What ranks that only measure leave in their folder."""
READY = "ready"
"""Store key under which rank 0 writes the number of steps once all ranks agree."""


def launch(plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
    """Run the plan to its end.

    Returns:
        The summary of a completed run, as in `summary.json`.

    Raises:
        ConfigError: `launch.port` is taken.
        SetupError: the machine is not ready (see `hetexp.launch.preflight`), another run holds a card, or a
            rank cannot be started.
        RunFailedError: a rank failed (the reason is on the screen and in the summary), a signal came, or
            the disk is full.
    """
    show_plan(plan, console)
    with ending_when_full(Path(plan.run_dir)):
        summary, caught, details = _run_ranks(plan, spec, console)
    if summary["status"] == "completed":
        show_summary(summary, Path(plan.run_dir), console)
        return summary
    _raise(summary, caught, details, console)


def measure(plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
    """Let the ranks of a plan measure their devices, in a folder of the run's own.

    Returns:
        What `hetexp.training.measuring.calibrate.calibrate` returned on rank 0.

    Raises:
        ConfigError, SetupError, RunFailedError: as `launch`.
    """
    plan = replace(plan, run_dir=str(Path(plan.run_dir) / "calibration"), measuring=True)
    names = ", ".join(device.id for device in plan.devices)
    console.print(f"Measuring {names} before the run …", highlight=False)
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
    """Start one rank a device and follow them to their end; again where devices were lost on the way.

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
    # A shared card is not leased.
    own = [device for device in plan.all_devices if is_here(device)]  # other machines take their own
    leases = Leases([] if config.hardware.share_devices else own, plan.run_dir)
    restarts, before = Restarts(plan, spec, partial(measure, console=console)), None
    with (
        leases,
        ControlServer(run_dir) as desk,
        _signals() as caught,
        diagrams(plan, config, console),
        followed(plan, config) as follower,
    ):
        while True:
            run = _Run(plan, spec, console, host_store(listener), before)
            run.take_orders(desk, leases)
            run.follower = follower
            try:
                run.start(plan_path)
                run.follow(caught)
            finally:
                run.end()
            if plan.measuring and not run.failures and not caught and (run_dir / CALIBRATION).exists():
                return blank_summary(plan, "completed"), caught, ""
            again = run.again(restarts, caught) if not caught else None
            if again is None:
                return run.conclude(caught), caught, run.details
            before, plan, spec = run, again.plan, again.spec
            listener = bind(plan.store_host, 0)  # the store before still has the port that was wanted
            plan = replace(plan, store_port=listener.getsockname()[1])
            plan.write(plan_path)


def _raise(summary: dict[str, Any], caught: list[signal.Signals], details: str, console: Console) -> NoReturn:
    if summary["status"] == "interrupted" and summary["checkpoint"] is not None:
        text = f"Its newest checkpoint, to go on from with resume=: {summary['checkpoint']}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if caught:
        console.print(f"Stopped by {caught[0].name}; every rank has ended.", style="bold yellow")
        raise RunFailedError(f"stopped by {caught[0].name}", exit_code=128 + caught[0])
    raise RunFailedError(summary["error"], details=details)


class _Run:
    """The members of one run, from their start to their end."""

    def __init__(
        self, plan: Plan, spec: RunSpec, console: Console, store: Any, before: _Run | None = None
    ) -> None:
        self.plan, self.spec, self.console, self.store = plan, spec, console, store
        self.config = config = spec.config
        self.started: list[Member] = []
        self.survival = GroupRecovery(plan, spec, console, store, self.started)
        self._starts_again = before is not None
        if before is not None:
            self.survival.membership.take_over(before.survival.membership)
            keep_faults(len(config.fault.events), before.store, store)
        self.failures: list[RankFailure] = []
        """`rank` in them is the member's number, which at first is that of its rank."""
        self.details = ""
        self.follower = Follower()
        self._ready = False
        self._requests = Requests(store)
        self._orders: CommandRunner | None = None
        self._stopped = StoppedWatch(config.fault.heartbeat_seconds)
        self._done_with: set[Member] = set()
        """Those that were stopped after the others had finished."""
        self._stop_by: float | None = None
        """When the ranks must have ended after a signal, by the monotonic clock."""

    def take_orders(self, desk: ControlServer, leases: Leases) -> None:
        """Let people ask the run for things while it trains."""
        shared = self.config.hardware.share_devices
        self._orders = CommandRunner(
            desk, self.survival, self._requests, self.spec, None if shared else leases
        )

    def start(self, plan_path: Path) -> None:
        """Start every rank."""
        for rank in range(self.plan.world_size):
            method = self.config.launch.start_method
            self.started.append(start_member(self.plan, plan_path, rank, method))

    def follow(self, caught: list[signal.Signals]) -> None:
        """Return when the run is over: all ranks have ended, one has failed so that the others cannot go on,
        the start took too long, or a signal came.
        """
        deadline = time.monotonic() + self.config.launch.timeout_seconds
        with Display(self.plan, self.console, self._starts_again) as display:
            while not caught or self._stops(caught):
                members = self.survival.present
                pause_for(members, POLL_SECONDS)
                codes = {member: member.process.poll() for member in members}
                codes |= dict.fromkeys(self._done_with & codes.keys(), 0)
                failed = {member: code for member, code in codes.items() if code}
                if failed and not self._goes_on_without(failed):
                    self._gather_failures()
                    return
                if not self._ready:
                    self._check_ready(display)
                if not self._ready or 0 in codes.values():
                    self._look_for_stopped([one for one, code in codes.items() if code is None])
                    if self.failures:
                        return
                if 0 in codes.values() and not self._ready:
                    self._gather_failures()
                    return
                if all(code == 0 for code in codes.values()):
                    return
                if not self._ready and time.monotonic() > deadline:
                    self.failures += self._late()
                    return
                if not self.survival.poll():
                    self._gather_failures()
                    return
                if self._orders is not None:
                    self._orders.poll()
                display.follow(self.survival.membership.plan, self.survival.present[0].log_path)
                display.update()

    def _stops(self, caught: list[signal.Signals]) -> bool:
        """Let the ranks save a last checkpoint and end, and tell whether they still may.

        Args:
            caught: the signals that came; the second one ends all at once.
        """
        if len(caught) > 1 or not self.survival.begun or self.survival.deaf:
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

    def _goes_on_without(self, failed: dict[Member, int]) -> bool:
        """Let the others go on, and tell whether they do."""
        found = {member: (_failure_of(member, code), code) for member, code in failed.items()}
        return self.survival.lose(found)

    def _check_ready(self, display: Display) -> None:
        if self.store.check([READY]):
            self._ready = True
            self.survival.begin()
            self.survival.membership.recovered()
            steps = int(self.store.get(READY))
            display.total_steps(steps)
            self.follower.ready(steps)

    def _look_for_stopped(self, members: list[Member]) -> None:
        """End what is stopped while no sign of life is due: the start by a failure, a rank that has done its
        work by a kill.
        """
        limit = self.config.fault.heartbeat_seconds
        for member, seconds in self._stopped.look(members).items():
            writes = member is self.survival.present[0]  # the summary, last of all
            if self._ready and seconds > limit * (UNSEEN if writes else 1.0):
                member.kill()
                self._done_with.add(member)
            elif not self._ready and seconds > limit:
                text = f"was stopped before training, for {limit:g} s (fault.heartbeat_seconds)."
                self.failures.append(self._stuck(member, "Frozen", text))

    def _late(self) -> list[RankFailure]:
        """Return the ranks that kept the others from training, by how far each of them came."""
        limit, address = self.config.launch.timeout_seconds, f"{self.plan.store_host}:{self.plan.store_port}"
        within = f"within {limit:g} s (launch.timeout_seconds)"
        stages = {
            "hello": f"did not connect to {address} {within}.",
            "handshake": f"connected to {address} but did not build its data and model {within}.",
        }
        for topic, text in stages.items():
            late = [one for one in self.started if not self.store.check([f"{topic}/{one.number}"])]
            if late:
                return [self._stuck(member, "StartTimeout", text) for member in late]
        text = f"agreed with all others at {address}, but training did not start {within}."
        return [self._stuck(self.started[0], "StartTimeout", text)]

    def _gather_failures(self) -> None:
        """Wait for ranks that are about to fail as well: the first to end need not be the first cause."""
        members = self.survival.present
        deadline = time.monotonic() + self._grace
        for member in members:
            member.process.wait(max(deadline - time.monotonic(), 0.0))
        codes = {member: member.process.poll() for member in members}
        found = {member: (_failure_of(member, code), code) for member, code in codes.items() if code}
        self.survival.blame(found)
        known = {failure.rank: failure for failure in self.survival.causes}
        failed = [failure for failure, _ in found.values()]
        self.failures += [known.pop(failure.rank, failure) for failure in failed] + list(known.values())
        if all(failure.peer_lost for failure in self.failures):
            self.failures += self._silent(codes)

    def _silent(self, codes: dict[Member, int | None]) -> list[RankFailure]:
        """Return the ranks that reported nothing: if no other rank gave a reason, they are the reason."""
        ended = [member for member, code in codes.items() if code == 0]
        if ended:
            text = "ended as if it had finished, while the others had not."
            return [self._stuck(member, "EndedEarly", text) for member in ended]
        limit = self.config.comm.timeout_seconds
        text = f"did not answer the others within {limit:g} s (comm.timeout_seconds)."
        left = [member for member, code in codes.items() if code is None]
        return [self._stuck(member, "NotResponding", text) for member in left]

    def _stuck(self, member: Member, kind: str, text: str) -> RankFailure:
        end = tail(member.log_path)
        who = f"rank {member.number}, {member.device},"
        return RankFailure(member.number, kind, f"End of its log:\n{end}\n{who} {text}", time=time.time())

    @property
    def _grace(self) -> float:
        """Seconds that ranks get to end by themselves: few where a lost device is the cause of it already."""
        lost = self.survival.troubled or any(failure.kind == "Frozen" for failure in self.failures)
        return min(self.config.launch.grace_seconds, 1.0 if lost else math.inf)

    def end(self) -> None:
        """End every process of the run: first by request, then by force; return when none is left."""
        end_all(self.started, self._grace)
        if self._orders is not None:
            self._orders.close()

    def again(self, restarts: Restarts, caught: list[signal.Signals]) -> Again | None:
        """Return how the run starts again, where it ended for devices that were lost; `None`: it is over.

        Args:
            caught: the signals that came; one that comes while a machine is waited for ends the run.
        """
        survival = self.survival
        own = [failure for failure in self.failures if not failure.peer_lost]
        silent = {failure.rank for failure in own if failure.kind == "NotResponding"}
        lost = {failure.rank: failure for failure in own if failure.rank in survival.troubled | silent}
        if not own or len(lost) < len(own) or not survival.may_start_again or self._stop_by is not None:
            return None
        again = restarts.after(survival.membership.whole, [self._device(number) for number in lost])
        if isinstance(again, str):
            self._print(f"The run does not start again: {again}")
            return None
        if not is_here(again.plan.devices[0]):
            self._print(f"The run does not start again. {NONE_HERE}")
            return None
        if not all_there(again.plan.devices, lambda: bool(caught)):
            self._print("The run does not start again without them.")
            return None
        step = survival.newest_step
        names = ", ".join(f"{self._device(number).id} ({one.kind})" for number, one in lost.items())
        rest = ", ".join(device.id for device in again.plan.all_devices)
        start = "starts" if len(again.plan.all_devices) == 1 else "start"
        self._print(f"{names} was lost at step {step}; {rest} {start} again from step {again.step}.")
        survival.membership.ended(
            [(number, self._device(number).id, one) for number, one in lost.items()], step, again.step
        )
        threading.Event().wait(again.pause_seconds)
        return again

    @property
    def _stopped_by_order(self) -> str:
        """What the summary says of a run that a person has stopped; empty otherwise."""
        stopped = self._orders is not None and self._orders.stopped
        return "stopped by hetexp control" if stopped else ""

    def conclude(self, caught: list[signal.Signals]) -> dict[str, Any]:
        """Return the summary that rank 0 wrote, or write one that tells what went wrong."""
        path = Path(self.plan.run_dir) / "summary.json"
        members = {loss.member for loss in self.survival.membership.losses}
        losses = [loss.to_dict() for loss in self.survival.membership.losses]
        stopped = f"stopped by {caught[0].name}" if caught else self._stopped_by_order
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
                first = self.survival.present[0]
                self.failures.append(self._stuck(first, "NoSummary", "ended without a summary."))
            cause = first_cause(self.failures)
            summary["error"] = self._tell(cause)
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

    def _tell(self, cause: RankFailure) -> str:
        """Print the first cause with its rank and device, and return it in one line."""
        device = self._device(cause.rank)
        at = "" if cause.step is None else f" at step {cause.step}"
        self.console.rule(f"rank {cause.rank}, {device}, failed{at}", style="bold red")
        self._print(cause.message)
        self.details = cause.message
        others = [f for f in self.failures if f is not cause]
        if others:
            ranks = ", ".join(f"rank {f.rank} ({'lost a peer' if f.peer_lost else f.kind})" for f in others)
            self.console.print(f"Followed by: {ranks}.", highlight=False)
        self._print(f"Logs of all ranks: {Path(self.plan.run_dir) / 'logs'}")
        state = card_state(device)
        if state is not None:
            self._print(f"{device} is {state}. It is not chosen again while that is so.")
        last_line = cause.message.strip().splitlines()[-1]
        if device.python is not None:
            self._print(f"Its interpreter: {device.python}")
        return f"rank {cause.rank}, {device}, failed{at}: {last_line}"

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _device(self, number: int) -> DeviceSpec:
        """Return the device of a member."""
        known = dict(enumerate(self.plan.devices)) | {one.number: one.device for one in self.started}
        return known[number]


def _failure_of(member: Member, exit_code: int) -> RankFailure:
    """Return why a member failed."""
    return replace(read_failure(member.log_path, member.number, exit_code), rank=member.number)


def newest_checkpoint(run_dir: Path) -> str | None:
    """Return the newest complete checkpoint of a run, `None` where there is none."""
    try:
        return str(find_checkpoint(run_dir))
    except HetexpError:
        return None


def card_state(device: DeviceSpec) -> str | None:
    """Return what is wrong with a real card itself by now, `None` where its driver tells of nothing."""
    if backend_class(device.backend).computes_on_cpu or not is_here(device):
        return None
    for card in detect(builds=[]).cards:
        same_uuid = device.uuid is not None and card.spec.uuid == device.uuid
        # A driver that is gone tells no UUID, and instances share their card's address.
        if same_uuid or (card.spec.uuid is None and device.pci is not None and card.spec.pci == device.pci):
            return f"lost ({card.lost})" if card.lost is not None else card.undriven
    return "no longer in the machine's list of cards"


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them.

    A signal that was ignored before (as SIGHUP is under nohup) stays ignored.
    """
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    ending = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    wanted = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]
    before = {s: signal.signal(s, lambda number, _: caught.append(signal.Signals(number))) for s in wanted}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Carries out the commands to a running training: `hetexp add`, `hetexp drop`, `hetexp control`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from hetexp.core.config import DeviceEntry
from hetexp.core.device import DeviceSpec
from hetexp.core.epoch import Departure
from hetexp.core.errors import ConfigError, SetupError
from hetexp.core.plan import Plan
from hetexp.core.precision import choose_precisions
from hetexp.hardware.detection.builds import known_builds
from hetexp.hardware.detection.busy import who_is_busy
from hetexp.hardware.detection.inventory import detect
from hetexp.hardware.detection.lease import Leases
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.selection.devices import select_devices, threads_for
from hetexp.launch.control import Answer, Command, ControlServer
from hetexp.launch.elastic.group_recovery import GroupRecovery
from hetexp.launch.elastic.respawn import Newcomer
from hetexp.launch.processes.members import Member
from hetexp.launch.requests import Requests
from hetexp.plan.run_spec import RunSpec

POLL_SECONDS = 0.1
"""Pause between two reads of the commands."""
_DEVICE_KEYS = ("`hardware.devices[0].device`", "`hardware.devices[0]`")
"""Keys of an added device in the messages of the device selection."""


@dataclass
class _Leaving:
    """A member that the user has dropped, until its process has ended."""

    member: Member
    command: Command
    deadline: float


class CommandRunner:
    """Carries out the user's commands in the loop of the launcher.

    Args:
        server: receives the commands; it must be open.
        leases: of the run's cards, to which added cards are added; `None` if cards are shared.
    """

    def __init__(
        self,
        server: ControlServer,
        recovery: GroupRecovery,
        requests: Requests,
        spec: RunSpec,
        leases: Leases | None,
    ) -> None:
        self._server, self._recovery, self._requests = server, recovery, requests
        self._spec, self._config, self._leases = spec, spec.config, leases
        self._polled_at = 0.0
        self._chosen: queue.SimpleQueue[tuple[Command, Newcomer | list[str]]] = queue.SimpleQueue()
        self._adding: dict[str, Command] = {}
        self._leaving: list[_Leaving] = []
        self.stopped = False
        """Whether the user has ended the run."""

    def poll(self) -> None:
        """Carry out new commands, and go on with those that take longer."""
        self._requests.poll()
        for leaving in list(self._leaving):
            self._finish_drop(leaving)
        while not self._chosen.empty():
            self._start_newcomer(*self._chosen.get())
        now = time.monotonic()
        if now - self._polled_at >= POLL_SECONDS:
            self._polled_at = now
            for command in self._server.commands():
                self._dispatch(command)

    def close(self) -> None:
        """Answer all open commands: the run has ended."""
        self._requests.close()
        for command in [*self._adding.values(), *(leaving.command for leaving in self._leaving)]:
            self._server.answer(command, Answer(False, "The run has ended."))

    def _dispatch(self, command: Command) -> None:
        if not self._recovery.begun:
            self._refuse(command, "The training has not begun yet: ask again in a moment.")
        elif self._recovery.ignores_commands:
            self._refuse(command, self._recovery.ignores_commands)
        elif command.name in ("add", "drop"):
            carry_out: Callable[[Command], None] = self._add if command.name == "add" else self._drop
            carry_out(command)
        else:
            if command.name == "stop":  # the last state is kept, as after a signal
                self._requests.send("checkpoint")
            self._requests.send(command.name, command.argument, partial(self._answered, command))

    def _answered(self, command: Command, answer: Answer) -> None:
        self.stopped |= command.name == "stop" and answer.done
        self._server.answer(command, answer)

    def _add(self, command: Command) -> None:
        membership, name = self._recovery.membership, command.argument
        if not self._recovery.reforms:
            self._refuse(command, self._why_fixed())
            return
        place = membership.place_of(name)
        self._adding[command.id] = command
        if place is None:
            threading.Thread(
                target=self._choose_in_thread, args=(command, membership.whole), daemon=True
            ).start()
        elif membership.member_at(place) is not None:
            self._answer_add(command, False, f"{name} trains already.")
        else:
            self._start(command, membership.whole.devices[place])

    def _choose_in_thread(self, command: Command, whole: Plan) -> None:
        """Choose the device in a thread, because the drivers may take seconds to answer."""
        try:
            chosen: Newcomer | list[str] = choose_newcomer(self._spec, whole, command.argument)
        except Exception as error:  # whatever a driver does, the training goes on
            chosen = [f"{type(error).__name__}: {error}"]
        self._chosen.put((command, chosen))

    def _start_newcomer(self, command: Command, chosen: Newcomer | list[str]) -> None:
        if isinstance(chosen, Newcomer):
            self._start(command, chosen.device, chosen)
        else:
            self._answer_add(command, False, " ".join(chosen))

    def _start(self, command: Command, device: DeviceSpec, newcomer: Newcomer | None = None) -> None:
        try:
            if self._leases is not None:
                self._leases.take(device)
        except SetupError as error:
            self._answer_add(command, False, str(error))
            return
        self._recovery.respawns.start(device, partial(self._answer_add, command), newcomer)

    def _drop(self, command: Command) -> None:
        membership, name = self._recovery.membership, command.argument
        place = membership.place_of(name)
        number = membership.member_at(place) if place is not None else None
        least = self._config.fault.min_devices
        if place is None:
            names = ", ".join(device.id for device in membership.whole.devices)
            self._refuse(command, f"`DEVICE` must be one of {names}, but is '{name}' instead.")
        elif not self._recovery.reforms:
            self._refuse(command, self._why_fixed())
        elif number is None:
            cancelled = self._recovery.respawns.cancel(name)
            text = f"{name} does not come back." if cancelled else f"{name} takes no part already."
            self._server.answer(command, Answer(True, text))
        elif len(membership.members) <= least:
            self._refuse(
                command, f"{len(membership.members)} of its devices are left, the fewest it goes on with."
            )
        else:
            member = next(member for member in self._recovery.present if member.number == number)
            membership.drop(number, Departure(number, name, "dropped", time.time()))
            limit = self._config.comm.timeout_seconds
            self._leaving.append(_Leaving(member, command, time.monotonic() + limit))

    def _finish_drop(self, leaving: _Leaving) -> None:
        """Answer once the process of a dropped device has ended."""
        membership, grace = self._recovery.membership, self._config.launch.grace_seconds
        member = leaving.member
        if not membership.forming and leaving.deadline > time.monotonic() + grace:
            leaving.deadline = time.monotonic() + grace  # the others train without it
        if member.process.poll() is None and time.monotonic() > leaving.deadline:
            member.kill()
        elif member.process.poll() is not None and not membership.forming:
            self._leaving.remove(leaving)
            member.kill()  # its data loader processes may still run
            if self._leases is not None:
                self._leases.release(member.device)
            left = ", ".join(device.id for device in membership.plan.devices)
            self._server.answer(leaving.command, Answer(True, f"{member.device} is out; {left} go on."))

    def _why_fixed(self) -> str:
        """Return why devices cannot come and go in this run."""
        if not self._config.fault.survive:
            return "`fault.survive` must be true for devices to come and go, but is False instead."
        whole = self._recovery.membership.whole
        if not whole.reforms:
            return f"Devices cannot come and go if {whole.way.name} carries the exchange (comm.backend=shm)."
        return f"Devices cannot come and go under strategy={whole.strategy}."

    def _answer_add(self, command: Command, done: bool, text: str) -> None:
        """Answer a command to add a device."""
        self._adding.pop(command.id, None)
        self._server.answer(command, Answer(done, text))

    def _refuse(self, command: Command, text: str) -> None:
        self._server.answer(command, Answer(False, text))


def choose_newcomer(spec: RunSpec, whole: Plan, name: str) -> Newcomer | list[str]:
    """Return a device to add to a run, or the problems with it. The checks are those of a run's start.

    Args:
        whole: the plan of all devices of the run.
        name: as in `hardware.devices`.
    """
    config = spec.config
    hardware = config.hardware.model_copy(
        update={"devices": [DeviceEntry(device=name)], "cards": None, "gpu_ids": None, "cuda_ids": None}
    )
    machine = Machine()
    inventory = detect(machine, known_builds(), who_is_busy(machine, config.hardware.busy_memory_mib, True))
    selection = select_devices(hardware, inventory)
    if selection.problems:
        return [_about_the_argument(problem) for problem in selection.problems]
    if len(selection.devices) != 1:
        return [f"`DEVICE` must be one device, but '{name}' means {len(selection.devices)}."]
    device = _with_free_name(selection.devices[0], whole)
    if (device.backend == "emulated") != whole.paced:
        kind = "emulated" if whole.paced else "not emulated"
        return [f"`DEVICE` must be {kind} as those of the run are, but is '{name}' instead."]
    devices = [*whole.devices, device]
    problems = list(spec.strategy.check(config, devices))
    precisions = choose_precisions(config.trainer.precision, devices)
    scaled = "float16" in whole.precisions
    if precisions[:-1] != whole.precisions or (precisions[-1] == "float16" and not scaled):
        problems.append(f"{device} would compute in {precisions[-1]}, and the run has no such precision.")
    if problems:
        return problems
    try:
        share = spec.policy.shares(devices, precisions)[-1]
    except ConfigError:  # the user's weights are for the other devices only
        share = 1 / len(devices)
    loaders = config.trainer.num_workers
    threads = threads_for(devices, config.hardware.threads_per_rank, loaders=loaders)[-1]
    return Newcomer(device, share, precisions[-1], threads)


def _with_free_name(device: DeviceSpec, whole: Plan) -> DeviceSpec:
    """Return a CPU rank or an emulated card with the first free name, and any other device as it is."""
    if device.backend not in ("cpu", "emulated"):
        return device
    taken = {device.id for device in whole.devices}
    index = next(n for n in range(len(taken) + 1) if f"{device.backend}:{n}" not in taken)
    return replace(device, id=f"{device.backend}:{index}", index=index, host=whole.devices[0].host)


def _about_the_argument(problem: str) -> str:
    for key in _DEVICE_KEYS:
        problem = problem.replace(key, "`DEVICE`")
    return problem

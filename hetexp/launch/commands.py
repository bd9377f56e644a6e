"""Carries out what a person asks of a running training: `hetexp add`, `hetexp drop`, `hetexp control`."""

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

LOOK_SECONDS = 0.1
"""Pause between two looks for orders."""
_KEYS = ("`hardware.devices[0].device`", "`hardware.devices[0]`")
"""What a device that is to be added is called where devices are chosen."""


@dataclass
class _Leaving:
    """A member that a person has taken out, until its process has ended."""

    member: Member
    order: Command
    deadline: float


class CommandRunner:
    """Looks for orders, and does what they say as far as it can be done.

    Args:
        desk: where they come in; open.
        leases: of the run's cards; those of added ones join them. `None` where cards are shared.
    """

    def __init__(
        self,
        desk: ControlServer,
        survival: GroupRecovery,
        requests: Requests,
        spec: RunSpec,
        leases: Leases | None,
    ) -> None:
        self._desk, self._survival, self._requests = desk, survival, requests
        self._spec, self._config, self._leases = spec, spec.config, leases
        self._looked = 0.0
        self._chosen: queue.SimpleQueue[tuple[Command, Newcomer | list[str]]] = queue.SimpleQueue()
        self._waiting: dict[str, Command] = {}
        self._leaving: list[_Leaving] = []
        self.stopped = False
        """Whether a person has ended the run."""

    def poll(self) -> None:
        """Take the orders that have come, and go on with those that take longer."""
        self._requests.poll()
        for one in list(self._leaving):
            self._see_off(one)
        while not self._chosen.empty():
            self._bring_new(*self._chosen.get())
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            for order in self._desk.orders():
                self._take(order)

    def close(self) -> None:
        """Answer what is open: the run has ended."""
        self._requests.close()
        for order in [*self._waiting.values(), *(one.order for one in self._leaving)]:
            self._desk.answer(order, Answer(False, "The run has ended."))

    def _take(self, order: Command) -> None:
        if not self._survival.begun:
            self._refuse(order, "The training has not begun yet: ask again in a moment.")
        elif self._survival.deaf:
            self._refuse(order, self._survival.deaf)
        elif order.command in ("add", "drop"):
            carry_out: Callable[[Command], None] = self._add if order.command == "add" else self._drop
            carry_out(order)
        else:
            if order.command == "stop":  # the last state is kept, as after a signal
                self._requests.send("checkpoint")
            self._requests.send(order.command, order.argument, partial(self._answered, order))

    def _answered(self, order: Command, answer: Answer) -> None:
        self.stopped |= order.command == "stop" and answer.done
        self._desk.answer(order, answer)

    def _add(self, order: Command) -> None:
        membership, name = self._survival.membership, order.argument
        if not self._survival.reforms:
            self._refuse(order, self._fixed())
            return
        place = membership.place_of(name)
        self._waiting[order.id] = order
        if place is None:
            threading.Thread(target=self._choose, args=(order, membership.whole), daemon=True).start()
        elif membership.member_at(place) is not None:
            self._answer_add(order, False, f"{name} trains already.")
        else:
            self._bring(order, membership.whole.devices[place])

    def _choose(self, order: Command, whole: Plan) -> None:
        """Find the device that is meant; asking the drivers may take seconds, so that a thread does it."""
        try:
            found: Newcomer | list[str] = choose_newcomer(self._spec, whole, order.argument)
        except Exception as error:  # whatever a driver does, the training goes on
            found = [f"{type(error).__name__}: {error}"]
        self._chosen.put((order, found))

    def _bring_new(self, order: Command, found: Newcomer | list[str]) -> None:
        if isinstance(found, Newcomer):
            self._bring(order, found.device, found)
        else:
            self._answer_add(order, False, " ".join(found))

    def _bring(self, order: Command, device: DeviceSpec, newcomer: Newcomer | None = None) -> None:
        try:
            if self._leases is not None:
                self._leases.take(device)
        except SetupError as error:
            self._answer_add(order, False, str(error))
            return
        self._survival.returns.bring(device, partial(self._answer_add, order), newcomer)

    def _drop(self, order: Command) -> None:
        membership, name = self._survival.membership, order.argument
        place = membership.place_of(name)
        number = membership.member_at(place) if place is not None else None
        least = self._config.fault.min_devices
        if place is None:
            known = ", ".join(device.id for device in membership.whole.devices)
            self._refuse(order, f"`DEVICE` must be one of {known}, but is '{name}' instead.")
        elif not self._survival.reforms:
            self._refuse(order, self._fixed())
        elif number is None:
            coming = self._survival.returns.forget(name)
            text = f"{name} does not come back." if coming else f"{name} takes no part already."
            self._desk.answer(order, Answer(True, text))
        elif len(membership.members) <= least:
            self._refuse(
                order, f"{len(membership.members)} of its devices are left, the fewest it goes on with."
            )
        else:
            member = next(one for one in self._survival.present if one.number == number)
            membership.drop(number, Departure(number, name, "dropped", time.time()))
            limit = self._config.comm.timeout_seconds
            self._leaving.append(_Leaving(member, order, time.monotonic() + limit))

    def _see_off(self, one: _Leaving) -> None:
        """Answer once the process of a dropped device has ended."""
        membership, grace = self._survival.membership, self._config.launch.grace_seconds
        if not membership.forming and one.deadline > time.monotonic() + grace:
            one.deadline = time.monotonic() + grace  # the others train without it
        if one.member.process.poll() is None and time.monotonic() > one.deadline:
            one.member.kill()
        elif one.member.process.poll() is not None and not membership.forming:
            self._leaving.remove(one)
            one.member.kill()  # what it may have left in its group
            if self._leases is not None:
                self._leases.release(one.member.device)
            left = ", ".join(device.id for device in membership.plan.devices)
            self._desk.answer(one.order, Answer(True, f"{one.member.device} is out; {left} go on."))

    def _fixed(self) -> str:
        """Say why the run's devices stay as they are."""
        if not self._config.fault.survive:
            return "`fault.survive` must be true for devices to come and go, but is False instead."
        whole = self._survival.membership.whole
        if not whole.reforms:
            return f"Devices cannot come and go where {whole.way.name} carries their sums (comm.backend=shm)."
        return f"Devices cannot come and go under strategy={whole.strategy}."

    def _answer_add(self, order: Command, done: bool, text: str) -> None:
        """Answer an order to add a device."""
        self._waiting.pop(order.id, None)
        self._desk.answer(order, Answer(done, text))

    def _refuse(self, order: Command, text: str) -> None:
        self._desk.answer(order, Answer(False, text))


def choose_newcomer(spec: RunSpec, whole: Plan, name: str) -> Newcomer | list[str]:
    """Return the device that a person wants to add to a run, or what speaks against it.

    The checks are those of a run's start.

    Args:
        whole: all devices that the run has.
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
        return [_of_the_command(problem) for problem in selection.problems]
    if len(selection.devices) != 1:
        return [f"`DEVICE` must be one device, but '{name}' means {len(selection.devices)}."]
    device = _named_apart(selection.devices[0], whole)
    if (device.backend == "emulated") != whole.paced:
        kind = "emulated" if whole.paced else "not emulated"
        return [f"`DEVICE` must be {kind} as those of the run are, but is '{name}' instead."]
    devices = [*whole.devices, device]
    problems: list[str] = list(spec.strategy.check(config, devices))
    precisions = choose_precisions(config.trainer.precision, devices)
    scaled = "float16" in whole.precisions
    if precisions[:-1] != whole.precisions or (precisions[-1] == "float16" and not scaled):
        problems.append(f"{device} would compute in {precisions[-1]}, and the run has no such precision.")
    if problems:
        return problems
    try:
        share = spec.policy.shares(devices, precisions)[-1]
    except ConfigError:  # weights that a person gave, one for each of the others
        share = 1 / len(devices)
    threads = threads_for(devices, config.hardware.threads_per_rank)[-1]
    return Newcomer(device, share, precisions[-1], threads)


def _named_apart(device: DeviceSpec, whole: Plan) -> DeviceSpec:
    """Return a device that there may be any number of with the first name that is free."""
    if device.backend not in ("cpu", "emulated"):
        return device
    taken = {one.id for one in whole.devices}
    index = next(n for n in range(len(taken) + 1) if f"{device.backend}:{n}" not in taken)
    return replace(device, id=f"{device.backend}:{index}", index=index, host=whole.devices[0].host)


def _of_the_command(problem: str) -> str:
    for key in _KEYS:
        problem = problem.replace(key, "`DEVICE`")
    return problem

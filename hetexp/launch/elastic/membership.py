"""Who trains, from epoch to epoch: the plan when a member goes or comes, and how ranks learn of it.

Nothing here starts or ends a process (`hetexp.launch.elastic.group_recovery` does).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetexp.core.device import DeviceSpec
from hetexp.core.epoch import LATEST, Departure, Epoch, plan_key, reformed_key
from hetexp.core.plan import Plan
from hetexp.launch.processes.failure import RankFailure
from hetexp.plan.replan import extended, replan

DEVICE_ERRORS = ("AcceleratorError", "DeviceMemoryError", "OutOfMemoryError")
"""Classes that only a device's trouble raises."""
_DEVICE_WORDS = re.compile(
    r"(CUDA|HIP|XPU|MPS|SYCL|NVML|NCCL|cuDNN|cuBLAS)[\w ]* error|hipError|cudaError|UR_RESULT_ERROR"
    r"|_STATUS_(INTERNAL|EXECUTION)|level[ _]zero|Native API failed|device[ _](is )?lost"
    r"|fallen off the bus|uncorrectable ECC|out of memory",
    re.IGNORECASE,
)
"""What runtimes and drivers say where torch has no class for it."""


def device_trouble(failure: RankFailure, exit_code: int) -> str | None:
    """Return what became of a rank's device, `None` where any other rank would have failed in the same way.

    A signal that a rank died of, and its device's own errors, are the device's; a mistake in a
    configuration, a model or a data set is everybody's.
    """
    if exit_code < 0:
        return failure.kind
    if exit_code == 143:
        return "SIGTERM"
    if failure.peer_lost:  # it waited for an epoch that did not come
        return failure.kind
    if failure.kind in DEVICE_ERRORS:
        return failure.kind
    last = failure.message.strip().splitlines()[-1] if failure.message.strip() else ""
    if failure.kind == "RuntimeError" and _DEVICE_WORDS.search(last):
        return "DeviceError"
    return None


@dataclass
class Loss:
    """A device that the run went on without, for a while or for good."""

    member: int
    device: str
    kind: str
    time: float
    """Seconds since the epoch when it was noticed."""
    step: int | None = None
    """Steps that were done by then."""
    recovered_seconds: float | None = None
    """From then until the others had formed their group again."""
    steps_lost: int | None = None
    reported: bool = False
    """Whether the person knows of it."""

    def to_dict(self) -> dict[str, Any]:
        """Return its entry in `failures` of the summary."""
        return {
            "step": self.step,
            "device": self.device,
            "kind": self.kind,
            "recovered_s": self.recovered_seconds,
            "steps_lost": self.steps_lost,
        }


class Membership:
    """The members of a run and its plan, changed one epoch at a time.

    Args:
        plan: that the run began with; its ranks are the first members.
        store: the launcher's own end of it.
    """

    def __init__(self, plan: Plan, store: Any) -> None:
        self.whole = self.plan = plan
        """All devices that belong to the run, those that are lost, too; and those that train now."""
        self._store = store
        self._places = {rank: rank for rank in range(plan.world_size)}
        """Member → place of its device in `whole`; of those that train now."""
        self.number = 0
        """Of the newest epoch."""
        self.joined: tuple[int, ...] = ()
        """Members that came with it."""
        self.losses: list[Loss] = []
        self.tries = 0
        """Epochs since one has formed."""
        self._waits_since: float | None = None
        self._folder = Path(plan.run_dir) / "plans"

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of those that train now, in the order of their ranks."""
        return tuple(sorted(self._places, key=lambda member: self._places[member]))

    @property
    def forming(self) -> bool:
        """Whether the newest epoch's group has not formed yet, as far as is known."""
        return self._waits_since is not None

    @property
    def forming_seconds(self) -> float:
        """How long its members have been at it."""
        return time.time() - self._waits_since if self._waits_since is not None else 0.0

    def place_of(self, device_id: str) -> int | None:
        """Return a device's place in the whole plan, `None` where the run has no such device."""
        places = (place for place, one in enumerate(self.whole.devices) if one.id == device_id)
        return next(places, None)

    def member_at(self, place: int) -> int | None:
        """Return the member that trains on a device, `None` if there is none."""
        return next((member for member, own in self._places.items() if own == place), None)

    def leave(self, lost: Mapping[int, Departure], steps: Mapping[int, int | None] | None = None) -> Epoch:
        """Publish the epoch without some members.

        Args:
            lost: what became of each of them.
            steps: how many steps each of them had done, as far as is known.
        """
        for member, departure in lost.items():
            del self._places[member]
            step = (steps or {}).get(member)
            self.losses.append(Loss(member, departure.device, departure.kind, departure.time, step))
        return self._publish(left=tuple(lost.values()), urgent=True)

    def join(self, newcomers: Mapping[int, int]) -> Epoch:
        """Publish the epoch with more members.

        Args:
            newcomers: member → place of its device in `whole`.
        """
        self._places |= newcomers
        return self._publish(joined=tuple(newcomers), urgent=False)

    def withdraw(self) -> None:
        """Leave out those that came with an epoch whose group has not formed, without another epoch."""
        for member in self.joined if self.forming else ():
            del self._places[member]
        self.joined, self._waits_since = (), None

    def form_again(self) -> Epoch:
        """Publish an epoch of the same members: their connections broke though none of them is gone."""
        return self._publish(joined=self.joined if self.forming else (), urgent=True)

    def drop(self, member: int, departure: Departure) -> Epoch:
        """Publish the epoch without a member that a person takes out."""
        del self._places[member]
        return self._publish(left=(departure,), urgent=False)

    def extend(self, device: DeviceSpec, share: float, precision: str, threads: int) -> int:
        """Take a new device into the run and return its place; no member trains on it yet."""
        self.whole = extended(self.whole, device, share, precision, threads)
        return self.whole.world_size - 1

    def plan_with(self, place: int) -> tuple[Plan, int]:
        """Return the plan as it will be once a device is back, and its rank there."""
        places = sorted({*self._places.values(), place})
        return replan(self.whole, places), places.index(place)

    def take_over(self, before: Membership) -> None:
        """Keep what was lost before the run started again; its members are none of the present ones."""
        self.losses = [replace(loss, member=-1) for loss in before.losses]

    def ended(self, lost: Sequence[tuple[int, str, RankFailure]], step: int | None, restart: int) -> None:
        """Note losses after which the whole run starts again.

        Args:
            lost: member, device and what became of it.
            step: that was done by then.
            restart: where the run goes on.
        """
        known = {loss.member for loss in self.losses}
        for member, device, failure in lost:
            if member not in known:
                self.losses.append(Loss(member, device, failure.kind, failure.time, step))
        for loss in self.losses:
            if loss.recovered_seconds is None:
                loss.steps_lost = max(0, (step or 0) - restart)

    def recovered(self) -> None:
        """Note that all train again, where the run has started again after a loss."""
        for loss in self.losses:
            if loss.recovered_seconds is None:
                loss.recovered_seconds, loss.reported = time.time() - loss.time, True

    def unreported(self) -> list[Loss]:
        """Return the losses that the others have recovered from since the last call."""
        new = [loss for loss in self.losses if loss.recovered_seconds is not None and not loss.reported]
        for loss in new:
            loss.reported = True
        return new

    def plan_with_new(
        self, device: DeviceSpec, share: float, precision: str, threads: int
    ) -> tuple[Plan, int]:
        """Return the plan as it will be with a device that the run has not had, and its rank there."""
        more = extended(self.whole, device, share, precision, threads)
        places = [*sorted(self._places.values()), more.world_size - 1]
        return replan(more, places), len(places) - 1

    def take_report(self) -> dict[str, Any] | None:
        """Take the first rank's report that the newest epoch's group has formed; `None` before and after."""
        key = reformed_key(self.number)
        if not self.forming or not self._store.check([key]):
            return None
        since, self._waits_since, self.tries = self._waits_since, None, 0
        report: dict[str, Any] = json.loads(self._store.get(key))
        now = time.time()
        for loss in self.losses:
            if loss.recovered_seconds is None:
                loss.recovered_seconds = now - loss.time
                loss.step = report.get("step", loss.step)  # a lost member's own last report is older
                loss.steps_lost = report.get("steps_lost")
        assert since is not None
        return report | {"waited": now - since}

    def _publish(
        self, left: tuple[Departure, ...] = (), joined: tuple[int, ...] = (), urgent: bool = True
    ) -> Epoch:
        self.number += 1
        self.tries += 1
        places = sorted(self._places.values())
        self.plan = replan(self.whole, places)
        path = self._folder / f"epoch_{self.number}.json"
        write_plan(self.plan, path)
        epoch = Epoch(self.number, self.members, str(path), joined, left, urgent)
        self._store.set(plan_key(self.number), self.plan.to_json())
        self._store.set(Epoch.key(self.number), epoch.to_json())
        self._store.set(LATEST, str(self.number))
        self._waits_since, self.joined = time.time(), joined
        return epoch


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan for processes of this machine, into a folder that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.write(path, durable=False)

"""The members of a run and its plan, from epoch to epoch, as the launcher publishes them in the store.

`hetexp.launch.elastic.group_recovery` starts and ends their processes.
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
from hetexp.core.epoch import LATEST, Departure, Epoch, SignedStore, plan_key, reformed_key
from hetexp.core.plan import Plan
from hetexp.launch.processes.failure import RankFailure
from hetexp.plan.replan import extended, replan

DEVICE_ERRORS = ("AcceleratorError", "DeviceMemoryError", "OutOfMemoryError")
"""Classes of errors that only a device's failure raises."""
_DEVICE_WORDS = re.compile(
    r"(CUDA|HIP|XPU|MPS|SYCL|NVML|NCCL|cuDNN|cuBLAS)[\w ]* error|hipError|cudaError|UR_RESULT_ERROR"
    r"|_STATUS_(INTERNAL|EXECUTION)|level[ _]zero|Native API failed|device[ _](is )?lost"
    r"|fallen off the bus|uncorrectable ECC|out of memory",
    re.IGNORECASE,
)
"""Messages of runtimes and drivers for which torch has no class."""


def device_trouble(failure: RankFailure, exit_code: int) -> str | None:
    """Return the kind of a device's failure; `None` for an error that every rank would hit.

    A signal that killed the rank, and an error of its device, count as the device's failure. A mistake in
    the configuration, the model or the data set does not.
    """
    if exit_code < 0:
        return failure.kind
    if exit_code == 143:
        return "SIGTERM"
    if failure.peer_lost:  # it waited for an epoch that did not come
        return failure.kind
    if failure.kind in DEVICE_ERRORS:
        return failure.kind
    if failure.kind == "RuntimeError" and _DEVICE_WORDS.search(failure.reason):
        return "DeviceError"
    return None


@dataclass
class Loss:
    """The loss of a device, without which the run went on for a while or to its end."""

    member: int
    device: str
    kind: str
    time: float
    """When the launcher noticed it, in seconds since 1970."""
    step: int | None = None
    """Steps done by then."""
    recovered_seconds: float | None = None
    """From then until the others had formed their group again."""
    steps_lost: int | None = None
    reported: bool = False
    """Whether the user has seen it."""

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
        plan: of the run's start; its ranks are the first members.
        store: the launcher's connection to the store.
    """

    def __init__(self, plan: Plan, store: SignedStore) -> None:
        self.whole = self.plan = plan
        """The plan of the devices that train now; `whole` also has the lost ones."""
        self._store = store
        self._places = {rank: rank for rank in range(plan.world_size)}
        """Member that trains now → place of its device in `whole`."""
        self.number = 0
        """Number of the newest epoch."""
        self.joined: tuple[int, ...] = ()
        """Members that joined with it."""
        self.losses: list[Loss] = []
        self.tries = 0
        """Epochs since the last one whose group formed."""
        self._waits_since: float | None = None
        self._folder = Path(plan.run_dir) / "plans"

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the members that train now, in the order of their ranks."""
        return tuple(sorted(self._places, key=lambda member: self._places[member]))

    @property
    def forming(self) -> bool:
        """Whether the newest epoch's group has not reported yet that it formed."""
        return self._waits_since is not None

    @property
    def forming_seconds(self) -> float:
        """How long the newest epoch's group has been forming."""
        return time.time() - self._waits_since if self._waits_since is not None else 0.0

    def place_of(self, device_id: str) -> int | None:
        """Return a device's place in the whole plan; `None` if the run has no such device."""
        places = (place for place, device in enumerate(self.whole.devices) if device.id == device_id)
        return next(places, None)

    def member_at(self, place: int) -> int | None:
        """Return the member that trains on a device, `None` if there is none."""
        return next((member for member, taken in self._places.items() if taken == place), None)

    def leave(self, lost: Mapping[int, Departure], steps: Mapping[int, int | None] | None = None) -> Epoch:
        """Publish the epoch without some members.

        Args:
            lost: member → its departure.
            steps: member → steps that it had done, if known.
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
        """Drop the members that joined with an epoch whose group has not formed; publish no epoch."""
        for member in self.joined if self.forming else ():
            del self._places[member]
        self.joined, self._waits_since = (), None

    def form_again(self) -> Epoch:
        """Publish an epoch of the same members, whose connections broke although all of them live."""
        return self._publish(joined=self.joined if self.forming else (), urgent=True)

    def drop(self, member: int, departure: Departure) -> Epoch:
        """Publish the epoch without a member that the user drops."""
        del self._places[member]
        return self._publish(left=(departure,), urgent=False)

    def extend(self, device: DeviceSpec, share: float, precision: str, threads: int) -> int:
        """Add a new device to the whole plan, and return its place; no member trains on it yet."""
        self.whole = extended(self.whole, device, share, precision, threads)
        return self.whole.world_size - 1

    def plan_with(self, place: int) -> tuple[Plan, int]:
        """Return the plan as it will be once a device is back, and its rank there."""
        places = sorted({*self._places.values(), place})
        return replan(self.whole, places), places.index(place)

    def take_over(self, before: Membership) -> None:
        """Keep the losses from before the restart; their members are none of the present ones."""
        self.losses = [replace(loss, member=-1) for loss in before.losses]

    def ended(self, lost: Sequence[tuple[int, str, RankFailure]], step: int | None, restart: int) -> None:
        """Note losses after which the whole run starts again.

        Args:
            lost: member, device and failure of each.
            step: steps done by then.
            restart: step from which the run starts again.
        """
        noted = {loss.member for loss in self.losses}
        for member, device, failure in lost:
            if member not in noted:
                self.losses.append(Loss(member, device, failure.kind, failure.time, step))
        for loss in self.losses:
            if loss.recovered_seconds is None:
                loss.steps_lost = max(0, (step or 0) - restart)

    def recovered(self) -> None:
        """Note that the training goes on after a restart."""
        for loss in self.losses:
            if loss.recovered_seconds is None:
                loss.recovered_seconds, loss.reported = time.time() - loss.time, True

    def unreported(self) -> list[Loss]:
        """Return the losses from which the others have recovered since the last call."""
        new = [loss for loss in self.losses if loss.recovered_seconds is not None and not loss.reported]
        for loss in new:
            loss.reported = True
        return new

    def plan_with_new(
        self, device: DeviceSpec, share: float, precision: str, threads: int
    ) -> tuple[Plan, int]:
        """Return the plan as it will be with a device that is new in the run, and its rank there."""
        larger = extended(self.whole, device, share, precision, threads)
        places = [*sorted(self._places.values()), larger.world_size - 1]
        return replan(larger, places), len(places) - 1

    def take_report(self) -> dict[str, Any] | None:
        """Return the first rank's report that the newest epoch's group has formed, once; else `None`."""
        text = self._store.read(reformed_key(self.number)) if self.forming else None
        if text is None:
            return None
        since, self._waits_since, self.tries = self._waits_since, None, 0
        report: dict[str, Any] = json.loads(text)
        now = time.time()
        for loss in self.losses:
            if loss.recovered_seconds is None:
                loss.recovered_seconds = now - loss.time
                loss.step = report.get("step", loss.step)  # the last report of the lost member is older
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
        self._store.write(plan_key(self.number), self.plan.to_json())
        self._store.write(Epoch.key(self.number), epoch.to_json())
        self._store.write(LATEST, str(self.number))
        self._waits_since, self.joined = time.time(), joined
        return epoch


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan for processes of this machine, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.write(path, durable=False)

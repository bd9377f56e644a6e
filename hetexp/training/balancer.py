"""The number of samples that each rank takes of each step; the same on every rank.

Under a policy that follows the devices' speeds, each step's message carries the seconds of every rank's step
before (`StepMessage`). All ranks then ask equal copies of one `BalanceScheduler`. Loaders read some steps
ahead: a decision holds from the first step on that no loader has read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetexp.balancing.estimate import DeviceEstimate
from hetexp.balancing.scheduler import BalanceScheduler, Decision, SchedulerSettings
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.files import naming
from hetexp.core.plan import Plan
from hetexp.core.split import Split, apportion
from hetexp.training.measuring.timer import StepTimer

log = logging.getLogger(__name__)

SPLITS_FILE = "splits.jsonl"
"""File in the run's folder with every change of the split, one a line."""


class Balancer:
    """Splits each step's samples over the ranks, as the plan says or as the devices' speeds ask.

    Args:
        plan: gives the first split, and the measured speeds of the devices.
        settings: how eagerly to split again; `None`: the plan's split holds for the whole run.
        ahead: steps beyond the present one that any rank's loader may have drawn (`read_ahead`).
    """

    def __init__(self, plan: Plan, settings: SchedulerSettings | None = None, ahead: int = 0) -> None:
        self._plan = plan
        self._lead = 1 + ahead
        self.scheduler: BalanceScheduler | None = None
        if settings is not None and plan.world_size > 1:
            first = Split(tuple(plan.local_batch_sizes))
            names = [device.id for device in plan.devices]
            self.scheduler = BalanceScheduler(
                start_curves(plan),
                first.total,
                first,
                settings,
                names=names,
                assumed=plan.calibration is None,
            )
        self._timeline: list[tuple[int, Split]] = []
        """Splits and the step from which each holds, in rising order; the plan's holds before the first."""
        self._probe_step: int | None = None
        """Step of a probe that is scheduled and not measured yet."""
        self.num_changes = 0

    @property
    def follows(self) -> bool:
        return self.scheduler is not None

    @property
    def weights(self) -> tuple[float, ...]:
        """Each device's fraction of a batch in the newest split, which may hold only some steps later."""
        if self.scheduler is None:
            return self._plan.card_shares or self._plan.shares
        split = self.scheduler.split
        return tuple(count / split.total for count in split.counts)

    def split(self, step: int, num_samples: int) -> Split:
        """Return every rank's samples of a step.

        Args:
            step: at most as far ahead as the loader reads.
            num_samples: of its global batch; the last one of an epoch may be short.
        """
        splits = [split for first, split in self._timeline if first <= step]
        if not splits:
            return _as_planned(num_samples, self._plan.shares)
        split = splits[-1]
        return split if num_samples == split.total else apportion(num_samples, split.counts)

    def now(self, num_samples: int) -> Split:
        """Return every rank's samples of other work than a training step, such as an evaluation."""
        shares = self._plan.shares if self.scheduler is None else self.scheduler.split.counts
        return apportion(num_samples, shares)

    def local_seconds(self, meter: StepTimer) -> float | None:
        """Return the seconds of this rank's work in the step before; `None` if no policy follows them."""
        return meter.since_last() if self.follows else None

    def observe(self, step: int, num_samples: int, seconds: Sequence[float], now: int) -> Decision | None:
        """Give the scheduler all ranks' seconds of a step, and return its decision.

        Args:
            step: the step that took these seconds.
            num_samples: of its global batch.
            seconds: of each rank's own work.
            now: the step that is just over.
        """
        if self.scheduler is None or (self._probe_step is not None and step < self._probe_step):
            return None  # the scheduled probe has not run yet
        counts = self.split(step, num_samples).counts
        self._probe_step = None
        decision = self.scheduler.observe(step, seconds, counts)
        if decision.action in ("resplit", "move", "probe"):
            first = now + self._lead
            self._timeline = [*self._since(step), (first, decision.split)]
            if decision.action == "probe":
                self._probe_step = first
                self._timeline.append((first + 1, self.scheduler.split))
            self.num_changes += 1
            return Decision(first, *(getattr(decision, key) for key in _KEPT))
        return decision

    def _since(self, step: int) -> list[tuple[int, Split]]:
        """Return the part of the timeline that holds from `step` on."""
        begun = max((first for first, _ in self._timeline if first <= step), default=0)
        return [entry for entry in self._timeline if entry[0] >= begun]

    def to_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, as JSON can hold it; `None` if the plan's split always holds."""
        if self.scheduler is None:
            return None
        return {
            "devices": self._identities(),
            "scheduler": self.scheduler.to_dict(),
            "timeline": [[first, list(split.counts)] for first, split in self._timeline],
            "probe_step": self._probe_step,
        }

    def restore(self, stored: dict[str, Any] | None) -> bool:
        """Restore what `to_dict` returned; return false if it is of other devices or another batch."""
        if self.scheduler is None or stored is None or stored["devices"] != self._identities():
            return False
        if stored["scheduler"]["total"] != self.scheduler.total:
            return False
        settings = self.scheduler.settings  # not the stored run's
        names = [device.id for device in self._plan.devices]
        self.scheduler = BalanceScheduler.from_dict(stored["scheduler"], names)
        self.scheduler.settings = settings
        self._timeline = [(first, Split(tuple(counts))) for first, counts in stored["timeline"]]
        self._probe_step = stored["probe_step"]
        return True

    def inherit(self, stored: dict[str, Any] | None) -> None:
        """Restore the speeds of the devices that stay, after other devices have come or gone.

        Decisions on the split of the ranks before do not hold any more.
        """
        if self.scheduler is None or stored is None:
            return
        places = {tuple(identity): place for place, identity in enumerate(stored["devices"])}
        for rank, identity in enumerate(self._identities()):
            place = places.get(tuple(identity))
            if place is not None:
                device = stored["scheduler"]["devices"][place]
                self.scheduler.devices[rank] = DeviceEstimate.from_dict(device)

    def _identities(self) -> list[list[str | None]]:
        return [[device.id, device.uuid, device.card, device.name] for device in self._plan.devices]

    def record(self, decision: Decision | None) -> None:
        """Write a change of the split into the run's folder and the log; rank 0 calls it."""
        if decision is None or decision.action not in ("resplit", "move", "probe"):
            return
        line = {
            "step": decision.step,
            "action": decision.action,
            "counts": list(decision.split.counts),
            "reason": decision.reason,
            "predicted_seconds": decision.predicted_seconds,
        }
        path = Path(self._plan.run_dir) / SPLITS_FILE
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        level = logging.INFO if decision.action == "resplit" else logging.DEBUG
        log.log(level, "another split from step %d on: %s.", decision.step, decision.reason)


_as_planned = lru_cache(maxsize=16)(apportion)  # called in every step, for a few batch sizes only
_KEPT = ("split", "action", "reason", "predicted_seconds")


def start_curves(plan: Plan) -> list[SpeedCurve]:
    """Return the first estimate of the devices' speeds: as measured, or else in the ratio of the shares.

    Shares give no absolute speed: a step with them is assumed to take a second.
    """
    if plan.calibration is not None:
        return [SpeedCurve.from_dict(device["curve"]) for device in plan.calibration["devices"]]
    total = sum(plan.local_batch_sizes)
    least = 1e-6  # a device of share 0 is tried all the same
    return [
        SpeedCurve(0.0, 1.0 / (max(share, least) * total), microbatch_size=plan.microbatch_size(rank))
        for rank, share in enumerate(plan.shares)
    ]

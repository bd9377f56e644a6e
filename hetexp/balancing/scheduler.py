"""Decides when to split again, by a pure function of all ranks' measurements, equal on all ranks.

After each step every rank passes the same numbers: the compute seconds and the local samples of each rank.
There are no clocks and no files. Only +, −, ×, ÷, rounding and square roots decide.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hetexp.balancing.average import ASSUMED_SPREAD, ASSUMED_VALUES, SpeedAverage
from hetexp.balancing.estimate import DeviceEstimate
from hetexp.balancing.solver import solve, step_times
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.split import Split, apportion

ALARM_STEPS = 5
ALARM_GAIN = 1.5
"""For `ALARM_STEPS` steps after a lasting change, a gain of `ALARM_GAIN` × `min_gain` is enough, because the
averages have few values yet."""
PROBE_BACKOFF = 16
"""Longest pause between probes, in units of `probe_every`. The pause of a device that stays slow doubles up
to it; a device at its best speed has it from the first probe on."""
_LISTED = 8
"""Most ranks whose samples a sentence names."""

_NUMBERS = ("_seen", "_alarm", "_looked", "_gain", "_probing", "_probe_after", "_probe_pause")

Action = Literal["keep", "resplit", "move", "probe", "return"]


@dataclass(frozen=True)
class Decision:
    """The decision of all ranks from `step` on, and the reason."""

    step: int
    """First step that uses the split."""
    split: Split
    action: Action
    """`keep`: the same split; `resplit`: a new split, or its first part; `move`: a further part of it;
    `probe`: a device without a share gets samples for this one step; `return`: back from a probe."""
    reason: str
    """Sentence for the log."""
    predicted_seconds: float | None = None
    """Predicted step with this split; `None` while devices are unknown."""

    @property
    def changed(self) -> bool:
        """Whether the split differs from the one before."""
        return self.action != "keep"


@dataclass(frozen=True)
class SchedulerSettings:
    """Settings of the decisions."""

    min_gain: float = 0.02
    """Smallest predicted gain in speed, as a fraction, that changes the split."""
    certainty: float = 200.0
    """Without a lasting change, a gain must be so large that chance would show it about once in so many
    comparisons, over all ranks."""
    max_move: float = 0.25
    """Largest fraction of the batch that changes ranks from one step to the next."""
    warmup_steps: int = 1
    """Number of first steps that do not count, because of compilers and allocators."""
    probe_every: int = 50
    """Steps between two probes of a device without samples; 0: no probes."""
    probe_slowdown: float = 1.5
    """Largest factor by which a probe with several samples may lengthen a step."""
    alpha: float = 0.02
    """Weight of the newest value in the running averages (`SpeedAverage`)."""

    def __post_init__(self) -> None:
        if self.min_gain < 0 or self.certainty < 1 or not 0 < self.max_move <= 1:
            raise ValueError(f"min_gain is 0 or more, certainty 1 or more, max_move in (0, 1]: {self}")
        if self.warmup_steps < 0 or self.probe_every < 0 or self.probe_slowdown < 1:
            raise ValueError(f"warmup_steps and probe_every are 0 or more, probe_slowdown 1 or more: {self}")


class BalanceScheduler:
    """Follows the devices' speeds, and decides when another split pays.

    Args:
        curves: of each rank, from a calibration or the catalogue; only their shape must be right.
        total: samples of the global batch.
        split: of the first step; by default the best one by the curves.
        minimum: fewest samples of each rank.
        communication: seconds after the work, as for `solve`.
        names: of the devices, for sentences.
        assumed: whether the curves were never measured, so that even their shape may be wrong.

    Raises:
        ValueError: as `solve`.
    """

    def __init__(
        self,
        curves: Sequence[SpeedCurve],
        total: int,
        split: Split | None = None,
        settings: SchedulerSettings = SchedulerSettings(),
        minimum: Sequence[int] | None = None,
        communication: float | Sequence[float] = 0.0,
        names: Sequence[str] | None = None,
        assumed: bool = False,
    ) -> None:
        self.settings, self.total = settings, total
        self.devices = [DeviceEstimate(c, SpeedAverage(settings.alpha), assumed=assumed) for c in curves]
        self.minimum = None if minimum is None else list(minimum)
        self.communication = communication if isinstance(communication, (int, float)) else list(communication)
        self.names = [f"rank {r}" if names is None else f"rank {r} ({names[r]})" for r in range(len(curves))]
        self.split = solve(curves, total, minimum, None, communication) if split is None else split
        """Present split; during a probe the one after it."""
        self.target: Split | None = None
        """Final split while samples still move."""
        if len(self.split.counts) != len(curves) or self.split.total != total:
            raise ValueError(
                f"the first split must be of {total} samples over {len(curves)} ranks: {self.split}"
            )
        self._seen = 0
        # The chance that a normal value exceeds this many deviations is below 1 / (certainty · ranks).
        # Rounded, since logarithms may differ in the last digit from platform to platform.
        self._deviations = round(math.sqrt(2 * math.log(settings.certainty * len(curves))), 6)
        self._looked: list[float] = []
        """Factors at the last search for the best split."""
        self._gain = 0.0
        """Gain of that split."""
        self._alarm = 0
        """Remaining steps with the lower limit after a lasting change."""
        self._probing: list[int] = []
        self._probe_after = [settings.probe_every] * len(curves)
        """Steps until each rank's next probe, if it has no samples."""
        self._probe_pause = [settings.probe_every] * len(curves)

    @property
    def curves(self) -> list[SpeedCurve]:
        """Return each rank's present curve; a rank without measurements has the others' median factor."""
        measured = [device.average.value for device in self.devices if device.average.num_values]
        typical = statistics.median(measured) if measured else 1.0
        return [device.curve.scaled(device.average.value or typical) for device in self.devices]

    def stragglers(self, threshold: float = 1.25) -> dict[int, float]:
        """Return rank → factor, for the ranks that are slower than at their best."""
        slower = {
            rank: device.average.value / device.best
            for rank, device in enumerate(self.devices)
            if device.best is not None
        }
        return {rank: factor for rank, factor in slower.items() if factor >= threshold}

    def observe(self, step: int, seconds: Sequence[float], samples: Sequence[int]) -> Decision:
        """Add the measurements of a step, and decide on the next one; the same on every rank.

        Args:
            step: number of the measured step.
            seconds: each rank's own forward and backward work, without waits; for several steps with one
                split their means.
            samples: each rank's local samples.

        Raises:
            ValueError: numbers are missing, or a rank worked for no time.
        """
        ranks = len(self.devices)
        if len(seconds) != ranks or len(samples) != ranks:
            raise ValueError(f"seconds and samples must be {ranks} numbers each, one a rank")
        self._seen += 1
        if self._seen <= self.settings.warmup_steps:
            return self._ignore(step, f"step {step} warms up and is not counted")
        if (given := sum(samples)) != self.total:
            return self._ignore(step, f"a batch of {given} samples instead of {self.total} tells nothing")
        shifted = []
        for rank, device in enumerate(self.devices):
            if samples[rank] and device.observe(seconds[rank], samples[rank], bool(self._probing)):
                shifted.append(rank)
        self._pool_spreads()
        return self._decide(step, shifted)

    def _pool_spreads(self) -> None:
        """Give each device the common noise of all as its assumption, which needs few steps."""
        squares, values = ASSUMED_SPREAD**2 * ASSUMED_VALUES, float(ASSUMED_VALUES)
        for device in self.devices:
            squares += device.average.variance * device.average.variance_values
            values += device.average.variance_values
        for device in self.devices:
            device.average.assumed_spread = math.sqrt(squares / values)

    def _decide(self, step: int, shifted: list[int]) -> Decision:
        now, was_probing = self.curves, self._probing
        unknown = [r for r, n in enumerate(self.split.counts) if n and not self.devices[r].known]
        if unknown:
            return self._ignore(step, f"{self.names[unknown[0]]} is not measured well enough yet")
        self._alarm = ALARM_STEPS if shifted else max(self._alarm - 1, 0)
        self._probing = []
        again = [r for r in was_probing if not self.devices[r].known or self.devices[r].shifts.suspects_less]
        if again and not shifted:
            return self._probe(step, again, now)
        reason = ""
        if self.target is None or shifted:
            self.target, reason = self._better(now, shifted)
        if self.target is not None:
            return self._move(step, reason, now)
        if probed := self._due(was_probing):
            return self._probe(step, probed, now)
        if was_probing:
            slow = ", ".join(self.names[rank] for rank in was_probing)
            return self._result(step, self.split, "return", f"{slow} would still make the step longer", now)
        return Decision(step + 1, self.split, "keep", reason, self._slowest(now, self.split))

    def _better(self, now: Sequence[SpeedCurve], shifted: Sequence[int]) -> tuple[Split | None, str]:
        """Return a split that is worth the change, or `None`, and the reason."""
        chance = self._by_chance(now)
        if self._alarm:  # few values since the change are enough, since a correction may follow soon
            chance = min(chance, ALARM_GAIN * self.settings.min_gain)
        needed = max(self.settings.min_gain, chance)
        factors = [device.average.value for device in self.devices]
        if shifted or self._moved_since_look(factors) or self._gain >= needed:
            target = self._solve(now)
            self._looked = factors
            self._gain = self._slowest(now, self.split) / self._slowest(now, target) - 1
            if self._gain >= needed and target != self.split:
                return target, self._why(now, target, shifted)
        limit = "worth a change" if chance < needed else "what noise can feign"
        return None, f"the best split would be {self._gain:.1%} faster, and {needed:.1%} is {limit}"

    def _moved_since_look(self, factors: Sequence[float]) -> bool:
        """Return whether an estimate has changed enough to solve again, which takes a millisecond."""
        least = self.settings.min_gain / 4
        return any(
            abs(new - old) > least * old for new, old in zip(factors, self._looked or [0.0], strict=False)
        )

    def _by_chance(self, now: Sequence[SpeedCurve]) -> float:
        """Return the gain that the averages' errors alone can show."""
        times = step_times(now, self.split, self.communication)
        slowest = times.index(max(times))
        variance = 0.0
        for rank, device in enumerate(self.devices):
            share = self.split.counts[rank] / self.total
            error = device.average.standard_error if self.split.counts[rank] else 0.0
            # The step follows the slowest rank, and the best split averages the errors of all.
            variance += ((rank == slowest) - share) ** 2 * error**2
        return self._deviations * math.sqrt(variance)

    def _move(self, step: int, reason: str, now: Sequence[SpeedCurve]) -> Decision:
        assert self.target is not None
        action: Action = "resplit" if reason else "move"
        most = max(int(self.settings.max_move * self.total), 1)
        self.split = _towards(self.split, self.target, most)
        left = sum(max(t - s, 0) for t, s in zip(self.target.counts, self.split.counts, strict=True))
        if not reason:
            reason = f"on the way to the split decided on: {_listed(self.split)} samples"
        if left:
            reason += f"; {left} samples move later, at most {most} a step"
        else:
            self.target = None
        for rank, count in enumerate(self.split.counts):
            if count:
                self._probe_after[rank] = self._probe_pause[rank] = self.settings.probe_every
        return self._result(step, self.split, action, reason, now)

    def _due(self, was_probing: Sequence[int]) -> list[int]:
        """Return the ranks that get samples for one step, to check whether they have recovered."""
        due = []
        for rank, count in enumerate(self.split.counts):
            device = self.devices[rank]
            if count or device.curve.cap == 0 or not self.settings.probe_every:
                continue
            if rank in was_probing:
                longest = PROBE_BACKOFF * self.settings.probe_every
                # A device that was never faster is unlikely to recover, and gets as few probes as possible.
                hopeful = rank in self.stragglers()
                self._probe_pause[rank] = min(2 * self._probe_pause[rank], longest) if hopeful else longest
                self._probe_after[rank] = self._probe_pause[rank]
            self._probe_after[rank] -= 1
            if self._probe_after[rank] <= 0:
                due.append(rank)
        return due

    def _probe(self, step: int, ranks: list[int], now: Sequence[SpeedCurve]) -> Decision:
        limit = self.settings.probe_slowdown * self._slowest(now, self.split)
        least = list(self.minimum or [0] * len(now))
        caps: list[int | None] = [None] * len(now)
        most = max(self.total // (4 * len(now)), 1)  # few enough for the others
        for rank in ranks:
            within = now[rank].samples_within(limit)
            least[rank] = caps[rank] = max(min(most if within is None else within, most), 1)
        self._probing = ranks
        split = solve(now, self.total, least, caps, self.communication)
        given = ", ".join(f"{self.names[rank]} gets {least[rank]}" for rank in ranks)
        reason = f"{given} of {self.total} samples for one step, to see how fast it is now"
        return self._result(step, split, "probe", reason, now)

    def _why(self, now: Sequence[SpeedCurve], target: Split, shifted: Sequence[int]) -> str:
        current, best = self._slowest(now, self.split), self._slowest(now, target)
        causes = []
        for rank in shifted[:_LISTED]:
            device = self.devices[rank]
            change = device.average.value / (device.before or device.average.value)
            only = "only " if change < 1 else ""
            causes.append(f"{self.names[rank]} takes {only}{change:.2f} times as long a sample as before")
        cause = ", ".join(causes) or "the devices' speeds are known better now"
        moved = f"{_listed(self.split)} to {_listed(target)} samples"
        return f"{cause}: from {moved}, {best:.4g} s instead of {current:.4g} s a step"

    def _solve(self, now: Sequence[SpeedCurve]) -> Split:
        return solve(now, self.total, self.minimum, None, self.communication)

    def _slowest(self, now: Sequence[SpeedCurve], split: Split) -> float:
        return max(step_times(now, split, self.communication))

    def _ignore(self, step: int, reason: str) -> Decision:
        action: Action = "return" if self._probing else "keep"  # also after a probe without a result
        self._probing = []
        return Decision(step + 1, self.split, action, reason)

    def _result(
        self, step: int, split: Split, action: Action, reason: str, now: Sequence[SpeedCurve]
    ) -> Decision:
        self._gain, self._looked = 0.0, []
        return Decision(step + 1, split, action, reason, self._slowest(now, split))

    def to_dict(self) -> dict[str, Any]:
        """Return the whole state as plain types, for checkpoints and for ranks that join."""
        return {
            "settings": asdict(self.settings),
            "total": self.total,
            "minimum": self.minimum,
            "communication": self.communication,
            "devices": [device.to_dict() for device in self.devices],
            "split": list(self.split.counts),
            "target": None if self.target is None else list(self.target.counts),
            "numbers": copy.deepcopy({name: getattr(self, name) for name in _NUMBERS}),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], names: Sequence[str] | None = None) -> BalanceScheduler:
        """Return the scheduler from the result of `to_dict`, which decides exactly like the original."""
        devices = [DeviceEstimate.from_dict(device) for device in stored["devices"]]
        scheduler = cls(
            [device.curve for device in devices],
            stored["total"],
            Split(tuple(stored["split"])),
            SchedulerSettings(**stored["settings"]),
            stored["minimum"],
            stored["communication"],
            names,
        )
        scheduler.devices = devices
        scheduler.target = None if stored["target"] is None else Split(tuple(stored["target"]))
        for name in _NUMBERS:
            setattr(scheduler, name, copy.deepcopy(stored["numbers"][name]))
        return scheduler


def imbalance(seconds: Sequence[float], samples: Sequence[int]) -> float | None:
    """Return the slowest rank's own time ÷ the mean, over ranks with samples; `None` if there are none."""
    worked = [s for s, n in zip(seconds, samples, strict=True) if n]
    return max(worked) * len(worked) / math.fsum(worked) if worked and max(worked) > 0 else None


def idle_seconds(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return each rank's wait for the slowest one, from the own times of a step."""
    return tuple(max(seconds) - own_seconds for own_seconds in seconds)


def _towards(split: Split, target: Split, most: int) -> Split:
    """Return the split that moves at most so many samples towards the target."""
    gained = [max(t - s, 0) for s, t in zip(split.counts, target.counts, strict=True)]
    lost = [max(s - t, 0) for s, t in zip(split.counts, target.counts, strict=True)]
    if sum(gained) <= most:
        return target
    changes = zip(split.counts, apportion(most, gained).counts, apportion(most, lost).counts, strict=True)
    return Split(tuple(count + more - less for count, more, less in changes))


def _listed(split: Split) -> str:
    shown = " / ".join(str(count) for count in split.counts[:_LISTED])
    return shown + (" / …" if len(split.counts) > _LISTED else "")

"""Chooses the devices of each pipeline, and each pipeline's part of the batch.

Few devices are grouped in every possible way. Many devices are grouped by speed or by their order. The cut of
a group is searched once (`hetexp.plan.stages.search`), and the steps of its groups estimate a grouping. The
best groupings are then balanced sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetexp.core.split import apportion
from hetexp.plan.stages.pipelines import Cut, Pipeline
from hetexp.plan.stages.search import choose_stages, does_not_fit

Exchange = Callable[[Sequence[Cut]], float]
"""Pipelines → seconds of the exchange of their gradients, after all have them."""

MAX_EXHAUSTIVE = 8
"""Most devices for which every grouping is estimated,"""
MAX_CUTS = 100_000
"""and most sets of devices × pairs of layers, on which the time of the search depends."""
FINALISTS = 8
"""Number of groupings whose samples are balanced."""
REFINED = 2
"""Number of these whose cuts are searched thoroughly."""
SOME = 64
"""Samples of a step by which devices are compared before their groups are known."""
ROUNDS = 6
"""Most corrections of the shares by the resulting steps."""


@dataclass(frozen=True)
class Grouping:
    """Pipelines that train together, each with a part of the batch."""

    cuts: tuple[Cut, ...]
    step_seconds: float
    """Step of the slowest pipeline plus the exchange."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(cut.samples for cut in self.cuts)

    @property
    def bubble(self) -> float:
        """Return the fraction of all devices' time in which nothing is computed."""
        busy = [seconds for cut in self.cuts for seconds in cut.step.busy_seconds]
        total = len(busy) * self.step_seconds
        return 1 - sum(busy) / total if total else 0.0


def choose_groups(
    pipeline: Pipeline,
    devices: Sequence[int],
    samples: int,
    exchange: Exchange = lambda cuts: 0.0,
    groups: Sequence[Sequence[int]] | None = None,
    fewest: int = 1,
    ends: Mapping[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Grouping:
    """Return the grouping of all these devices with the shortest step over so many samples.

    Args:
        fewest: number of groups. If it is above 1, at least one group has several devices, because other
            strategies are better with the whole model on every device.
        groups: fixed groups, in the order of their stages, for which only cuts and samples are chosen.
        ends: fixed group → its cut, if that is fixed, too.

    Raises:
        ValueError: no grouping fits the devices' memory or the layers.
    """
    chooser = _Chooser(pipeline, samples, exchange, groups is None, ends or {})
    if groups is not None:
        candidates: list[list[tuple[int, ...]]] = [[tuple(group) for group in groups]]
    else:
        num_cuts = 2 ** len(devices) * len(pipeline.layers) ** 2
        few = len(devices) <= MAX_EXHAUSTIVE and num_cuts <= MAX_CUTS
        candidates = [
            candidate
            for candidate in (_all_groupings if few else _even_groupings)(pipeline, devices)
            if len(candidate) >= fewest and (fewest == 1 or len(candidate) < len(devices))
        ]
    estimates = [(chooser.estimate(candidate), number) for number, candidate in enumerate(candidates)]
    fitting = sorted((seconds, number) for seconds, number in estimates if seconds is not None)
    balanced = [chooser.balance(candidates[number]) for _, number in fitting[:FINALISTS]]
    finalists = [grouping for grouping in balanced if grouping is not None]
    if not finalists:
        raise ValueError(chooser.why or "there is no way to put the devices into groups")

    def order(grouping: Grouping) -> tuple[float, int]:
        return grouping.step_seconds, len(grouping.cuts)

    return min(map(chooser.refine, sorted(finalists, key=order)[:REFINED]), key=order)


class _Chooser:
    """Searches the cut of each group once, and judges groupings by their cuts."""

    def __init__(
        self,
        pipeline: Pipeline,
        samples: int,
        exchange: Exchange,
        any_order: bool,
        ends: Mapping[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self._pipeline, self._samples, self._exchange = pipeline, samples, exchange
        self._any_order, self._ends = any_order, ends
        self._cuts: dict[tuple[tuple[int, ...], int], Cut | None] = {}
        self._rates = _rates(pipeline, samples)
        self.why: str | None = None
        """The last reason why a group does not fit."""

    def cut(self, group: tuple[int, ...], samples: int) -> Cut | None:
        """Return a good cut of a group for so many samples; `None` if none fits."""
        key = (group, samples)
        if key not in self._cuts:
            try:
                self._cuts[key] = self._best(group, samples, thorough=False)
            except ValueError as error:
                self._cuts[key], self.why = None, str(error)
        return self._cuts[key]

    def _best(self, group: tuple[int, ...], samples: int, thorough: bool) -> Cut:
        if group not in self._ends:
            return choose_stages(self._pipeline, group, samples, self._any_order, thorough)
        cut = self._pipeline.judge(group, self._ends[group], samples)
        if not self._pipeline.fits(cut):
            raise ValueError(does_not_fit(self._pipeline, cut, "the cut that is given does not fit"))
        return cut

    def refine(self, grouping: Grouping) -> Grouping:
        """Return a grouping with the best cuts of its groups."""
        cuts = [self._best(cut.group, cut.samples, thorough=True) for cut in grouping.cuts]
        better = self._of(cuts)
        return better if better.step_seconds < grouping.step_seconds else grouping

    def estimate(self, groups: Sequence[tuple[int, ...]]) -> float | None:
        """Return the estimated step of a grouping: batch ÷ sum of its groups' speeds + exchange."""
        total = sum(self._rates[device] for group in groups for device in group)
        cuts, rate = [], 0.0
        for group in groups:
            part = sum(self._rates[device] for device in group) / total
            cut = self.cut(group, max(1, round(self._samples * part)))
            if cut is None:
                return None
            cuts.append(cut)
            rate += cut.samples / cut.step.step_seconds
        return self._samples / rate + self._exchange(cuts)

    def balance(self, groups: Sequence[tuple[int, ...]]) -> Grouping | None:
        """Return a grouping with the samples that give the shortest step; `None` if none fits."""
        if len(groups) > self._samples:
            self.why = f"{self._samples} samples are too few for {len(groups)} pipelines"
            return None
        rates = [sum(self._rates[device] for device in group) for group in groups]
        best: Grouping | None = None
        counts: tuple[int, ...] = ()
        for _ in range(ROUNDS):
            shared = _at_least_one(apportion(self._samples, rates).counts)
            if shared == counts:
                break
            counts = shared
            grouping = self._with(groups, counts)
            if grouping is None:
                break
            best = grouping if best is None or grouping.step_seconds < best.step_seconds else best
            rates = [cut.samples / cut.step.step_seconds for cut in grouping.cuts]
        return None if best is None else self._even_out(groups, best)

    def _even_out(self, groups: Sequence[tuple[int, ...]], best: Grouping) -> Grouping:
        """Return the grouping after moving single samples from its slowest pipeline while that helps."""
        while True:
            slowest = max(range(len(groups)), key=lambda g: best.cuts[g].step.step_seconds)
            moved = []
            for other in range(len(groups)):
                counts = list(best.batch_sizes)
                counts[slowest] -= 1
                counts[other] += 1
                if other != slowest and counts[slowest]:
                    moved.append(self._with(groups, counts))
            better = [g for g in moved if g is not None and g.step_seconds < best.step_seconds]
            if not better:
                return best
            best = min(better, key=lambda grouping: grouping.step_seconds)

    def _with(self, groups: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Grouping | None:
        cuts = [self.cut(group, count) for group, count in zip(groups, counts, strict=True)]
        fitting = [cut for cut in cuts if cut is not None]
        return self._of(fitting) if len(fitting) == len(cuts) else None

    def _of(self, cuts: Sequence[Cut]) -> Grouping:
        return Grouping(tuple(cuts), max(cut.step.step_seconds for cut in cuts) + self._exchange(cuts))


def _all_groupings(pipeline: Pipeline, devices: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield every grouping, without those that only swap equal devices."""
    first: dict[int, int] = {}
    for device in devices:
        first[device] = next((d for d in first if pipeline.devices[d] == pipeline.devices[device]), device)
    seen = set()

    def groupings(left: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
        if not left:
            yield []
            return
        head, *rest = left
        for mask in range(2 ** len(rest)):
            group = (head, *(device for bit, device in enumerate(rest) if mask >> bit & 1))
            others = [device for bit, device in enumerate(rest) if not mask >> bit & 1]
            for groups in groupings(others):
                yield [group, *groups]

    for groups in groupings(devices):
        key = tuple(sorted(tuple(sorted(first[device] for device in group)) for group in groups))
        if key not in seen:
            seen.add(key)
            yield groups


def _even_groupings(pipeline: Pipeline, devices: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield for each number of groups: groups of equal speed, and groups of neighbours in order or speed."""
    speeds = _rates(pipeline, SOME)
    fastest_first = sorted(devices, key=lambda device: -speeds[device])
    for count in range(1, len(devices) + 1):
        groups: list[list[int]] = [[] for _ in range(count)]
        rates = [0.0] * count
        for device in fastest_first:
            least = min(range(count), key=lambda g: (rates[g], g))
            groups[least].append(device)
            rates[least] += speeds[device]
        yield [tuple(group) for group in groups]
        if 1 < count < len(devices):
            ends = [len(devices) * (g + 1) // count for g in range(count)]
            yield [tuple(devices[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
            yield [tuple(fastest_first[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _rates(pipeline: Pipeline, samples: int) -> list[float]:
    """Return the approximate speed of each device, with so many samples a step for all of them."""
    size = pipeline.sizes(len(pipeline.devices), samples)[0]
    return [1 / sum(device.seconds(1.0, size)) for device in pipeline.devices]


def _at_least_one(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the counts with a sample from the largest count for each count of zero."""
    shared = list(counts)
    for place, count in enumerate(shared):
        if count == 0:
            most = max(range(len(shared)), key=lambda p: shared[p])
            shared[place], shared[most] = 1, shared[most] - 1
    return tuple(shared)

"""Which devices form pipelines, and what part of the batch each pipeline takes.

Few devices are put together in every way; of many, in ways that make groups about as fast as each other, or
alike. A group's cut is found once (`hetexp.plan.stages.search`) and its speed is that of its step, so that a
whole grouping is judged by a few numbers. The best groupings get their samples by their own steps, to the
last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetexp.core.split import apportion
from hetexp.plan.stages.pipelines import Cut, Pipeline
from hetexp.plan.stages.search import choose_stages, does_not_fit

Exchange = Callable[[Sequence[Cut]], float]
"""Pipelines → seconds in which they exchange their gradients, after all have them."""

EVERY_WAY = 8
"""Devices up to which every grouping is judged,"""
MOST_STRETCHES = 100_000
"""and sets of devices × pairs of layers, which is how long their cuts take to find."""
FINALISTS = 8
"""Groupings whose samples are shared out exactly."""
REFINED = 2
"""Of them those whose cuts are looked at closely."""
SOME = 64
"""Samples by which devices are compared before their groups' are known."""
ROUNDS = 6
"""Times that shares are corrected by the steps that come of them."""


@dataclass(frozen=True)
class Grouping:
    """Pipelines that train together, each with a part of the batch."""

    cuts: tuple[Cut, ...]
    step_seconds: float
    """Of the slowest pipeline, and the exchange."""

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
    """Return the groups of these devices, all of them in one, whose step over so many samples is shortest.

    Args:
        fewest: groups. Where they must be several, at least one of them has several devices: the model whole
            on every device is what other strategies do better.
        groups: given ones, in the order of their stages; only their cuts and samples are chosen then.
        ends: of each given group the cut, where that is given, too.

    Raises:
        ValueError: no grouping fits the devices' memory or the layers.
    """
    chooser = _Chooser(pipeline, samples, exchange, groups is None, ends or {})
    if groups is not None:
        ways: list[list[tuple[int, ...]]] = [[tuple(group) for group in groups]]
    else:
        few = len(devices) <= EVERY_WAY and 2 ** len(devices) * len(pipeline.layers) ** 2 <= MOST_STRETCHES
        ways = [
            way
            for way in (_every_way if few else _even_ways)(pipeline, devices)
            if len(way) >= fewest and (fewest == 1 or len(way) < len(devices))
        ]
    rough = [
        (judged, number) for number, way in enumerate(ways) if (judged := chooser.rough(way)) is not None
    ]
    shared = [chooser.exact(ways[number]) for _, number in sorted(rough)[:FINALISTS]]
    found = [grouping for grouping in shared if grouping is not None]
    if not found:
        raise ValueError(chooser.why or "there is no way to put the devices into groups")
    found.sort(key=lambda one: (one.step_seconds, len(one.cuts)))
    return min(map(chooser.refined, found[:REFINED]), key=lambda one: (one.step_seconds, len(one.cuts)))


class _Chooser:
    """Cuts of groups, each found once."""

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
        """Of a group that cannot be: the last reason."""

    def cut(self, group: tuple[int, ...], samples: int) -> Cut | None:
        """Return a good cut of a group for so many samples, `None` where none fits."""
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

    def refined(self, grouping: Grouping) -> Grouping:
        """Return a grouping with the best cuts of its groups."""
        cuts = [self._best(cut.group, cut.samples, thorough=True) for cut in grouping.cuts]
        better = self._of(cuts)
        return better if better.step_seconds < grouping.step_seconds else grouping

    def rough(self, way: Sequence[tuple[int, ...]]) -> float | None:
        """Return about the step of a grouping: the batch ÷ what its groups do together, and the exchange."""
        total = sum(self._rates[device] for group in way for device in group)
        cuts, rate = [], 0.0
        for group in way:
            part = sum(self._rates[device] for device in group) / total
            cut = self.cut(group, max(1, round(self._samples * part)))
            if cut is None:
                return None
            cuts.append(cut)
            rate += cut.samples / cut.step.step_seconds
        return self._samples / rate + self._exchange(cuts)

    def exact(self, way: Sequence[tuple[int, ...]]) -> Grouping | None:
        """Return a grouping with the samples that make its slowest group quickest, `None` where none fits."""
        if len(way) > self._samples:
            self.why = f"{self._samples} samples are too few for {len(way)} pipelines"
            return None
        rates = [sum(self._rates[device] for device in group) for group in way]
        best: Grouping | None = None
        counts: tuple[int, ...] = ()
        for _ in range(ROUNDS):
            shared = _at_least_one(apportion(self._samples, rates).counts)
            if shared == counts:
                break
            counts = shared
            grouping = self._with(way, counts)
            if grouping is None:
                break
            best = grouping if best is None or grouping.step_seconds < best.step_seconds else best
            rates = [cut.samples / cut.step.step_seconds for cut in grouping.cuts]
        return None if best is None else self._evened(way, best)

    def _evened(self, way: Sequence[tuple[int, ...]], best: Grouping) -> Grouping:
        """Return the grouping after moving single samples off its slowest pipeline as long as that helps."""
        while True:
            slowest = max(range(len(way)), key=lambda g: best.cuts[g].step.step_seconds)
            others = []
            for other in range(len(way)):
                counts = list(best.batch_sizes)
                counts[slowest] -= 1
                counts[other] += 1
                if other != slowest and counts[slowest]:
                    others.append(self._with(way, counts))
            better = [one for one in others if one is not None and one.step_seconds < best.step_seconds]
            if not better:
                return best
            best = min(better, key=lambda one: one.step_seconds)

    def _with(self, way: Sequence[tuple[int, ...]], counts: Sequence[int]) -> Grouping | None:
        cuts = [self.cut(group, count) for group, count in zip(way, counts, strict=True)]
        found = [cut for cut in cuts if cut is not None]
        if len(found) < len(cuts):
            return None
        return self._of(found)

    def _of(self, cuts: Sequence[Cut]) -> Grouping:
        return Grouping(tuple(cuts), max(cut.step.step_seconds for cut in cuts) + self._exchange(cuts))


def _every_way(pipeline: Pipeline, devices: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield every grouping; of devices that are alike, one."""
    first: dict[int, int] = {}
    for device in devices:
        first[device] = next((d for d in first if pipeline.devices[d] == pipeline.devices[device]), device)
    seen = set()

    def ways(left: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
        if not left:
            yield []
            return
        head, *rest = left
        for mask in range(2 ** len(rest)):
            group = (head, *(one for bit, one in enumerate(rest) if mask >> bit & 1))
            others = [one for bit, one in enumerate(rest) if not mask >> bit & 1]
            for way in ways(others):
                yield [group, *way]

    for way in ways(devices):
        key = tuple(sorted(tuple(sorted(first[device] for device in group)) for group in way))
        if key not in seen:
            seen.add(key)
            yield way


def _even_ways(pipeline: Pipeline, devices: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield, for each number of groups, groups of about the same speed, and neighbours in the given order."""
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
    """Return about how much each device does a second, with so many samples a step for all of them."""
    size = pipeline.sizes(len(pipeline.devices), samples)[0]
    return [1 / sum(device.seconds(1.0, size)) for device in pipeline.devices]


def _at_least_one(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the counts with a sample for each that has none, from those that have most."""
    given = list(counts)
    for place, count in enumerate(given):
        if count == 0:
            most = max(range(len(given)), key=lambda p: given[p])
            given[place], given[most] = 1, given[most] - 1
    return tuple(given)

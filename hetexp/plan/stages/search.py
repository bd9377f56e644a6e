"""Searches the cut of a model into the contiguous stages of one pipeline with the shortest step.

Each cut is judged by its simulated schedule (`hetexp.plan.stages.pipelines`), and must fit the memory. If
there are few cuts, all of them are tried. Otherwise dynamic programming finds the cuts with the least sum of
stage times for each slowest stage. A step of m microbatches is mostly this sum plus m − 1 times the slowest
stage (Narayanan et al., PipeDream, 2019; Tarnawski et al., 2020). The best cuts are then moved layer by layer
while that makes the step shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations

from hetexp.core.device import GIB
from hetexp.plan.calibrated_plan import LEAST_GAIN
from hetexp.plan.stages.pipelines import Cut, Pipeline

MOST_ACTIONS = 60_000
"""Most simulated actions to try every cut, which take about 0.2 s."""
STARTS = 3
"""Number of cuts that are improved, if there are too many to try all."""
FEW = 4
"""Most devices whose orders are all tried."""


def choose_stages(
    pipeline: Pipeline, devices: Sequence[int], samples: int, any_order: bool = True, thorough: bool = True
) -> Cut:
    """Return the cut of the model over these devices with the shortest step.

    Args:
        devices: of the pipeline, in their preferred order.
        samples: of a step.
        any_order: whether other orders of the devices are tried: all orders of few devices, else those by
            memory (1F1B keeps most in its first stage) and by speed.
        thorough: whether to improve the cuts of the dynamic programming, and to try more orders.

    Raises:
        ValueError: there are fewer layers than stages, or no cut fits the memory.
    """
    num_stages = pipeline.num_stages(len(devices))
    if num_stages > len(pipeline.layers):
        raise ValueError(
            f"{len(pipeline.layers)} layers cannot be cut into {num_stages} stages: each needs a layer"
        )
    orders = _orders(pipeline, devices, FEW if thorough else 2) if any_order else [tuple(devices)]
    most = MOST_ACTIONS // len(orders) if thorough else None
    found = [cut for order in orders for cut in _best(pipeline, order, samples, most)]
    if not found:
        raise ValueError(_why_none_fits(pipeline, devices, samples))
    best = min(found, key=lambda cut: (cut.step.step_seconds, orders.index(cut.group)))
    as_given = next((cut for cut in found if cut.group == orders[0]), best)
    # Another order must bring a measurable gain.
    if best.step.step_seconds >= as_given.step.step_seconds * (1 - LEAST_GAIN):
        return as_given
    return best


def even_cut(pipeline: Pipeline, devices: Sequence[int], samples: int) -> Cut:
    """Return the cut that gives each stage about as many layers."""
    count, stages = len(pipeline.layers), pipeline.num_stages(len(devices))
    ends = [count * (index + 1) // stages for index in range(stages)]
    return pipeline.judge(devices, ends, samples)


def _orders(pipeline: Pipeline, devices: Sequence[int], few: int) -> list[tuple[int, ...]]:
    """Return the orders to try, the given one first, without those that only swap equal devices.

    Args:
        few: most devices whose orders are all tried.
    """
    if len(devices) > few:
        by_memory = sorted(devices, key=lambda d: -(pipeline.devices[d].memory_bytes or 0))
        fastest_first = sorted(devices, key=lambda d: sum(pipeline.devices[d].seconds(1.0, 1)))
        return list(dict.fromkeys([tuple(devices), tuple(by_memory), tuple(fastest_first)]))
    orders: dict[tuple[int, ...], tuple[int, ...]] = {}
    kinds = {device: _kind(pipeline, device, devices) for device in devices}
    for order in permutations(devices):
        orders.setdefault(tuple(kinds[device] for device in order), order)
    return list(orders.values())


def _kind(pipeline: Pipeline, device: int, devices: Sequence[int]) -> int:
    """Return the first of the devices that equals this one in speed and links."""

    def alike(other: int) -> bool:
        if pipeline.devices[other] != pipeline.devices[device]:
            return False
        peers = [peer for peer in devices if peer not in (other, device)]
        return all(pipeline.send(device, p, 2.0**20) == pipeline.send(other, p, 2.0**20) for p in peers)

    return next(other for other in devices if alike(other))


def _best(pipeline: Pipeline, devices: tuple[int, ...], samples: int, most: int | None) -> list[Cut]:
    """Return the best fitting cut for this order of the devices; an empty list if none fits.

    Args:
        most: most simulated actions to try every cut; `None`: only the cuts of the dynamic programming.
    """
    count, stages = len(pipeline.layers), pipeline.num_stages(len(devices))
    actions = 3 * stages * len(pipeline.sizes(len(devices), samples))
    if most is not None and math.comb(count - 1, stages - 1) * actions <= most:
        cuts = [
            pipeline.judge(devices, (*ends, count), samples)
            for ends in combinations(range(1, count), stages - 1)
        ]
    else:
        starts = [pipeline.judge(devices, ends, samples) for ends in _promising(pipeline, devices, samples)]
        starts = [*starts, even_cut(pipeline, devices, samples)]
        starts = sorted(filter(pipeline.fits, starts), key=lambda cut: cut.step.step_seconds)
        cuts = starts[:1] if most is None else [_moved(pipeline, cut) for cut in starts[:STARTS]]
    fitting = [cut for cut in cuts if pipeline.fits(cut)]
    return [min(fitting, key=lambda cut: (cut.step.step_seconds, cut.ends))] if fitting else []


def _moved(pipeline: Pipeline, cut: Cut) -> Cut:
    """Return the cut after moving boundaries by one layer while the step gets shorter."""
    better: Cut | None = cut
    while better is not None:
        cut, better = better, None
        for boundary in range(len(cut.ends) - 1):
            for step in (-1, 1):
                ends = list(cut.ends)
                ends[boundary] += step
                if any(end <= first for first, end in zip((0, *ends[:-1]), ends, strict=True)):
                    continue
                other = pipeline.judge(cut.group, ends, cut.samples)
                best = (better or cut).step.step_seconds
                if pipeline.fits(other) and other.step.step_seconds < best:
                    better = other
    return cut


def _promising(pipeline: Pipeline, devices: tuple[int, ...], samples: int) -> list[tuple[int, ...]]:
    """Return cuts with the least sum of stage times, each for another limit to the slowest stage.

    Each limit lies below the slowest stage of the previous cut, until no cut keeps it.
    """
    sizes = pipeline.sizes(len(devices), samples)
    table = _Table(pipeline, devices, sizes)
    first = table.least_sum(math.inf)
    if first is None:
        return []
    fill, slowest, ends = first
    cuts = [ends]
    best = fill + (len(sizes) - 1) * slowest
    least = fill
    limit = slowest
    while True:
        # A cut with a slower stage could not be better than the best one so far.
        limit = min(limit, (best - least) / max(1, len(sizes) - 1) * (1 + 1e-9))
        answer = table.least_sum(limit, strictly=True)
        if answer is None:
            return cuts
        fill, slowest, ends = answer
        cuts.append(ends)
        best = min(best, fill + (len(sizes) - 1) * slowest)
        limit = slowest


class _Table:
    """Times of every range of layers in every stage that fits the stage's part of the device's memory."""

    def __init__(self, pipeline: Pipeline, group: Sequence[int], sizes: Sequence[int]) -> None:
        devices = [group[place] for place in pipeline.places(len(group))]
        self._layers, self._stages = len(pipeline.layers), len(devices)
        _, kept = pipeline.order(len(group), len(sizes))
        self._seconds: list[dict[tuple[int, int], float]] = []
        self._travel: list[list[float]] = []
        for index, device in enumerate(devices):
            memory = pipeline.devices[device].memory_bytes
            limit = None if memory is None else memory // pipeline.stages_a_rank
            own: dict[tuple[int, int], float] = {}
            for first in range(self._layers):
                for end in range(first + 1, self._layers + 1):
                    if limit is None or pipeline.need(first, end, kept[index], sizes[0]) <= limit:
                        both = pipeline.pass_seconds(devices, index, first, end, sizes[0])
                        own[first, end] = sum(both)
            self._seconds.append(own)
            there = index + 1 < len(devices)
            self._travel.append(
                [
                    2
                    * pipeline.send(
                        device, devices[index + 1], sizes[0] * pipeline.layers[end - 1].output_bytes
                    )
                    if there and end
                    else 0.0
                    for end in range(self._layers + 1)
                ]
            )

    def least_sum(self, limit: float, strictly: bool = False) -> tuple[float, float, tuple[int, ...]] | None:
        """Return the least sum of all stages and transfers, and slowest stage and ends of its cut.

        Args:
            limit: to each stage's seconds.
            strictly: whether a stage must stay below it.
        """
        best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *[None] * self._layers]
        for index in range(self._stages):
            after: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (self._layers + 1)
            for (first, end), seconds in self._seconds[index].items():
                before = best[first]
                if before is None or seconds > limit or (strictly and seconds == limit):
                    continue
                total = before[0] + seconds + self._travel[index][end]
                best_so_far = after[end]
                if best_so_far is None or total < best_so_far[0]:
                    after[end] = (total, max(before[1], seconds), (*before[2], end))
            best = after
        return best[self._layers]


def _why_none_fits(pipeline: Pipeline, group: Sequence[int], samples: int) -> str:
    """Return what the devices lack for the cut that comes nearest to fitting."""
    sizes, devices = pipeline.sizes(len(group), samples), [group[p] for p in pipeline.places(len(group))]
    _, kept = pipeline.order(len(group), len(sizes))
    count = len(pipeline.layers)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(math.inf, ())] * count]
    for index, device in enumerate(devices):
        limit = pipeline.devices[device].memory_bytes
        after: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (count + 1)
        for first in range(count):
            for end in range(first + 1, count + 1):
                part = 0.0 if limit is None else pipeline.need(first, end, kept[index], sizes[0]) / limit
                worst = max(best[first][0], part)
                if worst < after[end][0]:
                    after[end] = (worst, (*best[first][1], end))
        best = after
    cut = pipeline.judge(group, best[count][1], samples)
    return does_not_fit(pipeline, cut, "no cut fits")


def does_not_fit(pipeline: Pipeline, cut: Cut, what: str) -> str:
    """Return the sentence about a cut that does not fit some devices.

    Args:
        what: its beginning, up to "the devices' memory".
    """
    needs = []
    for device, need in zip(cut.group, cut.memory_bytes, strict=True):
        limit = pipeline.devices[device].memory_bytes
        if limit is not None and need > limit:
            name = pipeline.devices[device].name or f"device {device}"
            needs.append(f"{name} would need {need / GIB:.2f} of {limit / GIB:.2f} GiB")
    return f"{what} the devices' memory: {', '.join(needs)}"

"""What the policies do not know: what each emulated card really takes, and the best split there is.

The times are those that the cards are paced by (`hetexp.hardware.emulation.emulated.CardTimes`, hidden
deviation included), without jitter: what passes take on average.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from torch.utils.data import DataLoader

from hetexp.balancing.solver import ceiling, solve
from hetexp.core.config import read_config
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Timeline, Work, step_seconds
from hetexp.core.plan import Plan
from hetexp.data.base import build_data
from hetexp.hardware.catalogue import card_of
from hetexp.hardware.emulation.deviation import JITTER, Deviation
from hetexp.hardware.emulation.emulated import UPDATE_PASSES, CardTimes
from hetexp.hardware.emulation.pacing import count_work
from hetexp.hardware.links import links_of
from hetexp.model.base import build_model

EXHAUSTIVE = 3
"""Most devices whose splits are all tried."""


@dataclass(frozen=True)
class Best:
    """The split of the shortest step, over the devices that shorten it."""

    counts: tuple[int, ...]
    """Of every device; 0 for one that takes no part."""
    ranks: tuple[int, ...]
    """The devices that take part: one with 0 samples among them still exchanges."""
    seconds: float
    exhaustive: bool
    """Whether all splits were looked at; else the solver's was mended sample by sample."""


class Truth:
    """The cards of one plan as they are; seconds are modelled ones, `time_scale` left out.

    Args:
        plan: of a run on all devices of the mix.
        buckets: what leaves the model in a step (`emulation.json`).
        slower: device number → how many times slower than usual.
    """

    def __init__(
        self, plan: Plan, buckets: Sequence[Sequence[float]], slower: dict[int, float] | None = None
    ) -> None:
        self.plan, self.buckets = plan, [(float(f), int(size)) for f, size in buckets]
        self.total: int = plan.config["trainer"]["global_batch_size"]
        config = read_config(plan.config)
        data = build_data(config.data)
        model = build_model(config.model, data.facts)
        inputs, _ = next(iter(DataLoader(data.train, batch_size=2)))
        self._sample_bytes = inputs[0].numel() * inputs[0].element_size()
        forward, backward, _ = count_work(model, inputs)
        weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self.times = []
        for rank, device in enumerate(plan.devices):
            deviation = Deviation(config.hardware.deviation_seed, device.index, jitter=0.0)
            figures = (card_of(device), plan.precisions[rank], forward, backward, UPDATE_PASSES * weights)
            self.times.append(CardTimes(*figures, deviation))
            self.times[-1].slower = (slower or {}).get(rank, 1.0)
        self.work = cache(self._work)
        self.curves = [self._curve(rank) for rank in range(plan.world_size)]

    def _work(self, rank: int, samples: int) -> Work:
        """Return a device's step with so many samples in one pass."""
        times = self.times[rank]
        if not samples:
            return Work((), (), times.update())
        forward = times.forward(samples, samples * self._sample_bytes)
        return Work((forward,), (times.backward(samples),), times.update())

    def own_seconds(self, rank: int, samples: int) -> float:
        """Return a device's own time of a step."""
        work = self.work(rank, samples)
        return sum(work.forward) + sum(work.backward) + work.update

    def _curve(self, rank: int) -> SpeedCurve:
        """Return the device as the solver takes it: a line with one kink, read off the card's own times."""
        update = self.own_seconds(rank, 0)

        def passed(samples: int) -> float:
            return self.own_seconds(rank, samples) - update

        slope = passed(2) - passed(1)
        fixed = passed(1) - slope
        straight = [n for n in range(1, self.total) if passed(n) <= (fixed + slope * n) * (1 + 1e-9)]
        at = straight[-1]
        kinks = ((at, passed(at + 2) - passed(at + 1)),) if at < self.total - 2 else ()
        return SpeedCurve(fixed, slope, kinks, update_seconds=update)

    def step_seconds(self, counts: Sequence[int], ranks: Sequence[int] | None = None) -> float:
        """Return what a step of these devices takes, exchange and waiting included."""
        ranks = range(self.plan.world_size) if ranks is None else ranks
        if len(ranks) == 1:
            return self.own_seconds(ranks[0], counts[ranks[0]])
        links = links_of(self.plan, [self.plan.devices[rank] for rank in ranks])
        return step_seconds([self.work(rank, counts[rank]) for rank in ranks], links, self.buckets)

    def solo_throughputs(self) -> tuple[float, ...]:
        """Return the samples a second of each device alone with the whole global batch."""
        return tuple(self.total / self.own_seconds(rank, self.total) for rank in range(self.plan.world_size))

    def best(self) -> Best:
        """Return the best split over every set of devices; of up to `EXHAUSTIVE` devices all are tried."""
        world = self.plan.world_size
        fastest = sorted(range(world), key=lambda rank: self.own_seconds(rank, self.total))
        small = world <= EXHAUSTIVE
        sets: Iterable[tuple[int, ...]] = (
            (ranks for count in range(1, world + 1) for ranks in combinations(range(world), count))
            if small
            else (tuple(sorted(fastest[:count])) for count in range(1, world + 1))
        )
        found = [self._best_of(ranks, small) for ranks in sets]
        return min(found, key=lambda best: best.seconds)

    def _best_of(self, ranks: tuple[int, ...], exhaustive: bool) -> Best:
        start = self._filled(ranks, solve([self.curves[rank] for rank in ranks], self.total).counts)
        best, seconds = start, self.step_seconds(start, ranks)
        if exhaustive:
            # The exchange only adds to the slowest device's own time: most splits need no closer look.
            own = [[self.own_seconds(rank, n) for n in range(self.total + 1)] for rank in ranks]
            candidates = []
            for counts in _splits(self.total, len(ranks)):
                least = max(times[n] for times, n in zip(own, counts, strict=True))
                if least < seconds:
                    candidates.append((least, counts))
            for least, counts in sorted(candidates):
                if least >= seconds:
                    break
                filled = self._filled(ranks, counts)
                found = self.step_seconds(filled, ranks)
                if found < seconds:
                    best, seconds = filled, found
            return Best(best, ranks, seconds, True)
        mended = True
        while mended:
            mended = False
            for giver in ranks:
                for taker in ranks:
                    if giver == taker or not best[giver]:
                        continue
                    moved = list(best)
                    moved[giver] -= 1
                    moved[taker] += 1
                    found = self.step_seconds(moved, ranks)
                    if found < seconds * (1 - 1e-12):
                        best, seconds, mended = tuple(moved), found, True
        return Best(best, ranks, seconds, False)

    def _filled(self, ranks: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
        whole = [0] * self.plan.world_size
        for rank, count in zip(ranks, counts, strict=True):
            whole[rank] = count
        return tuple(whole)

    def jitter(self, best: Best, steps: int = 400) -> float:
        """Return by how much the passes' jitter alone lengthens a step of the best split, as a fraction.

        A step waits for the slowest of its ranks, and which one that is changes; simulated.
        """
        links = links_of(self.plan, [self.plan.devices[rank] for rank in best.ranks])
        seed = self.plan.config["hardware"]["deviation_seed"]
        draw = random.Random(seed)
        amount = 0.0 if seed is None else JITTER
        timeline = Timeline(links)
        for _ in range(steps):
            work = []
            for rank in best.ranks:
                one = self.work(rank, best.counts[rank])
                passes = [
                    [s * draw.uniform(1 - amount, 1 + amount) for s in p] for p in (one.forward, one.backward)
                ]
                work.append(Work(tuple(passes[0]), tuple(passes[1]), one.update))
            timeline.step(work, self.buckets)
        return max(timeline.ends) / steps / best.seconds - 1

    def closed_form(self) -> float:
        """Return the efficiency that fixed costs alone allow: samples divisible, links free, no waiting.

        With a device's time a + c · b on the line that its share lies on, all end at once after
        T = (B + Σ a / c) / Σ 1 / c; the efficiency is B / T ÷ the sum of the solo throughputs. For equal
        cards with a fixed share f of the solo step that is 1 / (1 + (n − 1) f).
        """
        split = solve(self.curves, self.total)
        sums = [0.0, 0.0]
        for curve, count in zip(self.curves, split.counts, strict=True):
            fixed, slope = curve.fixed_seconds + curve.update_seconds, curve.seconds_per_sample
            for at, beyond in curve.kinks:
                if count > at:
                    fixed, slope = fixed + (slope - beyond) * at, beyond
            sums[0] += fixed / slope
            sums[1] += 1 / slope
        seconds = (self.total + sums[0]) / sums[1]
        return self.total / seconds / sum(self.solo_throughputs())

    def losses(self) -> tuple[float, float]:
        """Return what the fixed costs and the rounding take of the sum of the solo throughputs."""
        allowed = ceiling(self.curves, self.total)
        return allowed.fixed, allowed.rounding


def _splits(total: int, parts: int) -> Iterable[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _splits(total - first, parts - 1):
            yield (first, *rest)

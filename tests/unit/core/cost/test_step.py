"""The cost model: known answers on paper, a simulation event by event, and what must hold for all numbers."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.core.cost.step import Channel, Links, Timeline, Work, step_seconds

END = [(1.0, 1.0)]
"""One bucket of one byte that leaves when backward is over."""


def takes(seconds: float) -> Channel:
    """A channel that needs so long for every message."""
    return Channel(latency_seconds=seconds)


def links(*to_host: float, exchange: float, staged: bool = True) -> Links:
    """Ranks whose links take so long in each direction; an all-reduce takes `exchange` in all."""
    rounds = max(2 * (len(to_host) - 1), 1)
    return Links(tuple(takes(t) for t in to_host), (takes(exchange / rounds),), staged)


# ---------------------------------------------------------------- channels


def test_a_channel_has_a_latency_and_a_rate() -> None:
    assert Channel(1e-3, 2e9).seconds(4e9) == pytest.approx(2.001)
    assert Channel(1e-3, 2e9).seconds(0) == 1e-3
    assert Channel().seconds(1e12) == 0.0


@pytest.mark.parametrize(
    ("ranks", "rounds", "part"),
    [(2, 2, 1.0), (3, 4, 4 / 3), (8, 14, 7 / 4)],
)
def test_a_ring_by_hand(ranks: int, rounds: int, part: float) -> None:
    """Scatter and gather are n − 1 rounds each, in which an n-th of the bytes moves on: 2 (n − 1) / n."""
    ring = Links((Channel(),) * ranks, (Channel(1e-4, 1e9),))
    assert ring.exchange_seconds(3e8) == pytest.approx(rounds * 1e-4 + part * 0.3)


def test_every_channel_of_the_exchange_is_passed() -> None:
    two_hosts = Links((Channel(),) * 2, (Channel(1e-4, 1e9), Channel(1e-3, 1e8)))
    assert two_hosts.exchange_seconds(1e8) == pytest.approx(2e-4 + 0.1 + 2e-3 + 1.0)


@pytest.mark.parametrize(
    ("ranks", "summed", "gathered"), [(2, 1.0, 1.0), (3, 7 / 4, 9 / 4), (8, 22 / 4, 16.0)]
)
def test_memory_that_ranks_share_by_hand(ranks: int, summed: float, gathered: float) -> None:
    """Two ranks write a tensor each and read one each: four. Three write three, and read 2/3 each twice."""
    memory = Links((Channel(),) * ranks, (Channel(1e-4, 1e9, shared=True),))
    assert memory.exchange_seconds(3e8) == pytest.approx(1e-4 + summed * 0.3)
    assert memory.coded_seconds(1e9, 3e8) == pytest.approx(1e-4 + gathered * 0.3)


def test_each_channel_has_ranks_of_its_own() -> None:
    """Four ranks on two hosts: two share memory, and one of each takes their sum over the network."""
    memory, network = Channel(0.0, 1e9, shared=True, ranks=2), Channel(1e-3, 1e8, ranks=2)
    hosts = Links((Channel(),) * 4, (memory, network))
    assert hosts.exchange_seconds(1e8) == pytest.approx(0.1 + 2e-3 + 1.0)
    assert hosts.coded_seconds(1e8, 2e7) == pytest.approx(0.1 + 1e-3 + 0.2)
    alone = Links((Channel(),) * 2, (replace(memory, ranks=1), network))
    assert alone.exchange_seconds(1e8) == pytest.approx(2e-3 + 1.0)
    coded = replace(hosts, wire=0.25)
    assert coded.bucket_seconds(1e8) == pytest.approx(0.1 + 1e-3 + 0.25)
    fast = replace(coded, device=(Channel(0.0, 1e9),) * 4)  # what leaves a device is summed first
    assert fast.bucket_out_seconds(0, 1e8) == fast.bucket_back_seconds(0, 1e8) == pytest.approx(0.1)


def test_codes_are_gathered_and_those_of_others_come_back() -> None:
    """Three ranks, codes of a quarter: out once, gathered, and back come two others' codes."""
    coded = Links((Channel(1e-5, 1e9),) * 3, (Channel(1e-4, 2e9),), wire=0.25)
    assert coded.bucket_out_seconds(0, 4e6) == pytest.approx(1e-5 + 1e-3)
    assert coded.bucket_seconds(4e6) == pytest.approx(2 * (1e-4 + 5e-4))
    assert coded.bucket_back_seconds(0, 4e6) == pytest.approx(1e-5 + 2e-3)
    work = [Work((), (), 0.0)] * 3
    step = coded.bucket_out_seconds(0, 4e6) + coded.bucket_seconds(4e6) + coded.bucket_back_seconds(0, 4e6)
    assert step_seconds(work, coded, [(1.0, 4e6)]) == pytest.approx(step)
    plain = replace(coded, wire=1.0)
    assert plain.bucket_out_seconds(0, 4e6) == plain.bucket_back_seconds(0, 4e6)
    assert plain.bucket_seconds(4e6) == plain.exchange_seconds(4e6)


def test_one_rank_exchanges_nothing() -> None:
    assert Links((Channel(),), (Channel(1e-4, 1e9, shared=True),)).exchange_seconds(1e9) == 0.0
    assert Links((Channel(),), (Channel(1e-4, 1e9),)).exchange_seconds(1e9) == 0.0


def test_only_staged_buckets_go_to_the_host() -> None:
    own = (Channel(1e-5, 1e9), Channel(2e-5, 2e9))
    staged = Links(own, (Channel(),))
    assert [staged.to_host_seconds(rank, 1e6) for rank in (0, 1)] == pytest.approx([1.01e-3, 5.2e-4])
    direct = Links(own, (Channel(),), staged=False)
    assert [direct.to_host_seconds(rank, 1e6) for rank in (0, 1)] == [0.0, 0.0]


# ---------------------------------------------------------------- a step on paper


def test_one_bucket_at_the_end() -> None:
    """Rank 0 works 0.1 + 0.5 + 1.0 and its link takes 0.2; rank 1 works 0.2 + 0.6 + 1.0, its link 0.05.

    First step: at the host at 1.8 and 1.85, summed (0.3) at 2.15, back at 2.35 and 2.2.
    Second step: at the host at 2.35 + 1.8 = 4.15 and 2.2 + 1.85 = 4.05, summed at 4.45, back at 4.65, 4.5.
    From then on a step takes 2.3: the way of the slower round trip, max(1.6 + 2 · 0.2, 1.8 + 2 · 0.05), and
    the sum. It is the quicker card that decides, because of its link.
    """
    work = [Work((0.5,), (1.0,), 0.1), Work((0.6,), (1.0,), 0.2)]
    channels = links(0.2, 0.05, exchange=0.3)
    timeline = Timeline(channels)
    timeline.step(work, END)
    assert timeline.ends == pytest.approx([2.35, 2.2])
    timeline.step(work, END)
    assert timeline.ends == pytest.approx([4.65, 4.5])
    assert step_seconds(work, channels, END) == pytest.approx(2.3)


@pytest.mark.parametrize(
    ("fraction", "seconds"),
    [
        (0.5, 3.0),  # leaves at 2.0 and is back at 2.6, when backward has 0.4 to go
        (0.7, 3.0),  # leaves at 2.4 and is back just in time
        (0.85, 3.3),  # half of its way is hidden
        (1.0, 3.6),  # none of it
    ],
)
def test_what_leaves_early_is_hidden(fraction: float, seconds: float) -> None:
    """Forward 1, backward 2; to the host 0.1, summed 0.4, back 0.1."""
    work = [Work((1.0,), (2.0,))] * 2
    assert step_seconds(work, links(0.1, 0.1, exchange=0.4), [(fraction, 1.0)]) == pytest.approx(seconds)


def test_buckets_wait_for_one_another() -> None:
    """Three buckets leave together at 2; to the host 0.1, summed 1, back 0.1.

    At the host at 2.1, 2.2, 2.3; summed at 3.1, 4.1, 5.1; back at 3.2, 4.2, 5.2.
    """
    work = [Work((1.0,), (1.0,))] * 2
    channels = links(0.1, 0.1, exchange=1.0)
    assert step_seconds(work, channels, [(1.0, 1.0)] * 3) == pytest.approx(5.2)
    # On cards of one vendor only the three sums are left.
    assert step_seconds(work, replace(channels, staged=False), [(1.0, 1.0)] * 3) == pytest.approx(5.0)


def test_steps_may_take_turns() -> None:
    """Rank 0 works 8 and has no link to wait for; rank 1 works 2, its link takes 2 for each of two buckets.

    First step: rank 0 is there at 8, when both of rank 1's have come (4, 6). It ends at 8, rank 1 at 12.
    Second step: rank 0 is there at 16; rank 1's come at 16 and 18. The ends are 18 and 20.
    Third step: rank 0 is there at 26, when both have come (24, 26): as the first. Two steps take 18.
    """
    work = [Work((2.0,), (6.0,)), Work((2.0,), (0.0,))]
    buckets = [(1.0, 1.0)] * 2
    timeline = Timeline(links(0.0, 2.0, exchange=0.0))
    ends = []
    for _ in range(4):
        timeline.step(work, buckets)
        ends.append(list(timeline.ends))
    assert ends == [[8.0, 12.0], [18.0, 20.0], [26.0, 30.0], [36.0, 38.0]]
    assert step_seconds(work, timeline.links, buckets) == pytest.approx(9.0)


def test_a_rank_without_samples_waits_for_the_others() -> None:
    work = [Work((), (), 0.3), Work((0.5,), (1.0,), 0.3)]
    assert step_seconds(work, links(0.1, 0.1, exchange=0.2), END) == pytest.approx(1.8 + 0.1 + 0.2 + 0.1)
    # Its own round trip decides where its link is slow enough: 0.3 + 2 · 2.0 + 0.2.
    assert step_seconds(work, links(2.0, 0.1, exchange=0.2), END) == pytest.approx(4.5)


def test_only_the_last_microbatch_exchanges() -> None:
    """Three passes of 1 + 2: the bucket leaves halfway through the last one, at 8, and is back at 8.6."""
    work = [Work((1.0,) * 3, (2.0,) * 3)] * 2
    assert step_seconds(work, links(0.1, 0.1, exchange=0.4), [(0.5, 1.0)]) == pytest.approx(9.0)
    assert step_seconds(work, links(0.1, 0.1, exchange=1.4), [(0.5, 1.0)]) == pytest.approx(9.6)


def test_without_an_exchange_a_step_is_its_work() -> None:
    assert step_seconds([Work((1.0,), (2.0,), 0.5)], links(9.0, exchange=9.0), []) == pytest.approx(3.5)


def test_a_step_starts_where_the_last_one_ended() -> None:
    timeline = Timeline(links(0.0, 0.0, exchange=0.0), ends=[5.0, 7.0])
    timeline.step([Work((1.0,), (1.0,))] * 2, [])
    assert timeline.ends == [7.0, 9.0]


# ---------------------------------------------------------------- event by event


class Events:
    """Calls what is due, in the order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._number), call))

    def run(self) -> None:
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class Line:
    """Carries one message at a time, first come first served."""

    def __init__(self, events: Events) -> None:
        self._events, self._waiting, self._busy = events, deque[tuple[float, Callable[[], None]]](), False

    def send(self, seconds: float, arrived: Callable[[], None]) -> None:
        self._waiting.append((seconds, arrived))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        seconds, arrived = self._waiting.popleft()
        self._busy = True
        self._events.after(seconds, partial(self._arrived, arrived))

    def _arrived(self, arrived: Callable[[], None]) -> None:
        self._busy = False
        arrived()
        self._next()


class Simulation:
    """Ranks that compute, send, wait and go on: each only knows what has just happened."""

    def __init__(self, work: Sequence[Work], links: Links, buckets: Sequence[tuple[float, float]]) -> None:
        self.work, self.links, self.buckets = work, links, buckets
        self.events = Events()
        self.exchange = Line(self.events)
        self.to_host = [Line(self.events) for _ in work]
        self.back = [Line(self.events) for _ in work]
        self.arrived: dict[tuple[int, int], int] = {}
        self.left = [0] * len(work)
        self.steps = [0] * len(work)
        self.ends = [0.0] * len(work)

    def run(self, num_steps: int) -> list[float]:
        self.num_steps = num_steps
        for rank in range(len(self.work)):
            self.start(rank)
        self.events.run()
        assert self.steps == [num_steps] * len(self.work)
        return self.ends

    def start(self, rank: int) -> None:
        mine = self.work[rank]
        last = mine.backward[-1] if mine.backward else 0.0
        before = mine.update + sum(mine.forward) + sum(mine.backward[:-1])
        self.left[rank] = len(self.buckets) + 1
        for number, (fraction, _) in enumerate(self.buckets):
            self.events.after(before + fraction * last, partial(self.leave, rank, number))
        self.events.after(before + last, partial(self.one_less, rank))

    def leave(self, rank: int, number: int) -> None:
        seconds = self.links.to_host_seconds(rank, self.buckets[number][1])
        self.to_host[rank].send(seconds, partial(self.at_host, self.steps[rank], number))

    def at_host(self, step: int, number: int) -> None:
        key = step, number
        self.arrived[key] = self.arrived.get(key, 0) + 1
        if self.arrived[key] == len(self.work):
            num_bytes = self.buckets[number][1]
            self.exchange.send(self.links.exchange_seconds(num_bytes), partial(self.summed, num_bytes))

    def summed(self, num_bytes: float) -> None:
        for rank, line in enumerate(self.back):
            line.send(self.links.to_host_seconds(rank, num_bytes), partial(self.one_less, rank))

    def one_less(self, rank: int) -> None:
        self.left[rank] -= 1
        if self.left[rank] == 0:
            self.ends[rank] = self.events.now
            self.steps[rank] += 1
            if self.steps[rank] < self.num_steps:
                self.start(rank)


small = st.integers(0, 6).map(float)


@st.composite
def cases(draw: Any, most_ranks: int = 4) -> tuple[list[Work], Links, list[tuple[float, float]]]:
    """Whole numbers, so that equal times are equal and a rhythm is soon found."""
    ranks = draw(st.integers(1, most_ranks))
    work = []
    for _ in range(ranks):
        passes = draw(st.integers(0, 3))
        times = st.lists(small, min_size=passes, max_size=passes).map(tuple)
        work.append(Work(draw(times), draw(times), draw(small)))
    rates = st.sampled_from([0.25, 0.5, 1.0, 4.0, float("inf")])
    channel = st.builds(Channel, st.integers(0, 2).map(float), rates)
    own = draw(st.lists(channel, min_size=ranks, max_size=ranks))
    shared = draw(st.lists(channel, min_size=1, max_size=2))
    fractions = sorted(draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=4)))
    buckets = [(fraction, float(draw(st.integers(1, 4)))) for fraction in fractions]
    return work, Links(tuple(own), tuple(shared), draw(st.booleans())), buckets


@given(cases(), st.integers(1, 3))
def test_three_channels_as_a_pipeline(
    case: tuple[list[Work], Links, list[tuple[float, float]]], num_steps: int
) -> None:
    work, channels, buckets = case
    timeline = Timeline(channels)
    for _ in range(num_steps):
        timeline.step(work, buckets)
    assert timeline.ends == pytest.approx(Simulation(work, channels, buckets).run(num_steps))


@settings(deadline=None, max_examples=60)
@given(cases(most_ranks=3))
def test_the_step_is_that_of_a_long_run(case: tuple[list[Work], Links, list[tuple[float, float]]]) -> None:
    work, channels, buckets = case
    timeline = Timeline(channels)
    for _ in range(300):
        timeline.step(work, buckets)
    before = max(timeline.ends)
    for _ in range(12):  # a multiple of every period that so few ranks can have
        timeline.step(work, buckets)
    average = (max(timeline.ends) - before) / 12
    assert step_seconds(work, channels, buckets) == pytest.approx(average, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=200)
@given(cases(), st.data())
def test_nothing_slower_makes_a_step_quicker(
    case: tuple[list[Work], Links, list[tuple[float, float]]], data: st.DataObject
) -> None:
    work, channels, buckets = case
    before = step_seconds(work, channels, buckets)
    rank = data.draw(st.integers(0, len(work) - 1))
    what = data.draw(st.sampled_from(["update", "passes", "link", "exchange", "bytes"]))
    more = data.draw(st.integers(1, 4))
    if what == "update":
        work[rank] = replace(work[rank], update=work[rank].update + more)
    elif what == "passes":
        mine = work[rank]
        forward = tuple(seconds + more for seconds in mine.forward)
        work[rank] = replace(mine, forward=forward, backward=tuple(s * (1 + more) for s in mine.backward))
    elif what == "link":
        own = list(channels.device)
        own[rank] = Channel(own[rank].latency_seconds + more, own[rank].bytes_per_second / 2)
        channels = replace(channels, device=tuple(own))
    elif what == "exchange":
        channels = replace(channels, exchange=(*channels.exchange, Channel(float(more))))
    else:
        buckets = [(fraction, num_bytes + more) for fraction, num_bytes in buckets]
    assert step_seconds(work, channels, buckets) >= before - 1e-9


@given(cases())
def test_a_step_is_no_shorter_than_any_part_of_it(
    case: tuple[list[Work], Links, list[tuple[float, float]]],
) -> None:
    work, channels, buckets = case
    seconds = step_seconds(work, channels, buckets)
    assert seconds >= max(w.update + sum(w.forward) + sum(w.backward) for w in work) - 1e-9
    assert seconds >= sum(channels.exchange_seconds(num_bytes) for _, num_bytes in buckets) - 1e-9


def every_rank_for_itself(
    work: Sequence[Work], channels: Links, buckets: Sequence[tuple[float, float]]
) -> float:
    """`step_seconds` without putting ranks together that are alike."""
    ranks = range(channels.world_size)
    slowest = 0.0
    for rank in ranks:
        timeline = Timeline(channels, [0.0 if other == rank else -math.inf for other in ranks], -math.inf)
        for steps in range(1, channels.world_size + 1):
            timeline.step(work, buckets)
            slowest = max(slowest, timeline.ends[rank] / steps)
    return slowest


@settings(deadline=None, max_examples=80)
@given(cases(most_ranks=3), st.lists(st.integers(0, 2), min_size=1, max_size=7))
def test_ranks_that_are_alike_count_once(
    case: tuple[list[Work], Links, list[tuple[float, float]]], copies: list[int]
) -> None:
    work, channels, buckets = case
    ranks = [copy % len(work) for copy in copies]
    many = replace(channels, device=tuple(channels.device[rank] for rank in ranks))
    jobs = [work[rank] for rank in ranks]
    expected = every_rank_for_itself(jobs, many, buckets)
    assert step_seconds(jobs, many, buckets) == pytest.approx(expected, rel=1e-12)

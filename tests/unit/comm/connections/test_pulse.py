"""Ranks wait for one that works as long as that takes, and for a silent one no longer than the limit."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hetexp.comm.connections.pulse import Pulse
from hetexp.core.errors import PeerLostError

LIMIT = 0.4


def ranks(count: int, limit: float = LIMIT) -> tuple[dist.HashStore, list[Pulse]]:
    store = dist.HashStore()
    return store, [Pulse(store, rank, count, limit) for rank in range(count)]


def test_nobody_leaves_before_all_have_come() -> None:
    _, pulses = ranks(3, limit=30.0)
    came: list[int] = []

    def rank(number: int) -> list[int]:
        seen = []
        for meeting in range(20):
            came.append(meeting)
            pulses[number].meet()
            seen.append(came.count(meeting))
        return seen

    with ThreadPoolExecutor(3) as pool:
        for seen in pool.map(rank, range(3)):
            assert seen == [3] * 20


def test_meetings_leave_nothing_but_the_last_ones() -> None:
    store, pulses = ranks(2, limit=30.0)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            list(pool.map(Pulse.meet, pulses))
    assert store.num_keys() <= 2 * 2


@pytest.mark.parametrize("how", ["beats", "beating"])
def test_one_that_works_is_waited_for_beyond_the_limit(how: str) -> None:
    _, (first, second) = ranks(2)
    over = threading.Event()

    def works() -> None:
        if how == "beating":
            with second.beating():
                over.wait(3 * LIMIT)
        else:
            end = time.monotonic() + 3 * LIMIT
            while time.monotonic() < end:
                second.beat()
                over.wait(0.01)
        second.meet()

    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(works)
        first.meet()
        assert time.monotonic() - started >= 3 * LIMIT
        done.result()


def test_a_silent_rank_is_named() -> None:
    _, (first, _, third) = ranks(3)
    third.beat()  # once is not enough
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Pulse(first._store, 1, 3, LIMIT).meet)
        with pytest.raises(PeerLostError, match=r"rank 2 gave no sign of life for 0\.4 s"):
            first.meet()


def test_signs_of_life_are_not_written_at_each_call() -> None:
    store, (pulse,) = ranks(1, limit=1000.0)
    for _ in range(1000):
        pulse.beat()
    assert store.get("pulse/0") == b"1"

"""Schedules: torch's own orders, known formulas, and another way to play them through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs

from hetexp.core.cost.pipeline import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    SCHEDULES,
    WEIGHT_GRADIENT,
    Action,
    Order,
    StageTimes,
    most_in_flight,
    order_of,
    play,
)

SINGLE: dict[str, Any] = {"gpipe": torchs.ScheduleGPipe, "1f1b": torchs.Schedule1F1B}
SEVERAL: dict[str, Any] = {
    "loopedbfs": torchs.ScheduleLoopedBFS,
    "interleaved1f1b": torchs.ScheduleInterleaved1F1B,
    "interleavedzerobubble": torchs.ScheduleInterleavedZeroBubble,
    "zbvzerobubble": torchs.ScheduleZBVZeroBubble,
}


def even_bubble(num_ranks: int, num_microbatches: int) -> float:
    """Return the bubble of equal stages whose messages take no time (Huang et al., GPipe, 2019)."""
    return (num_ranks - 1) / (num_microbatches + num_ranks - 1)


class RecordingStage:
    """Stands in for a stage of torch's: no messages, and what it is asked to compute is written down."""

    def __init__(self, index: int) -> None:
        self.stage_index, self.actions = index, list[Action]()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.actions.append(Action(self.stage_index, FORWARD, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.actions.append(Action(self.stage_index, BACKWARD, microbatch))


def torch_does(name: str, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return what torch's schedule with one stage a rank lets it compute; its own table of 1F1B is wrong."""
    schedule = SINGLE[name].__new__(SINGLE[name])
    schedule._n_microbatches, schedule._num_stages = microbatches, ranks
    schedule._stage = stage = RecordingStage(rank)
    schedule._check_inputs = lambda *_: ([()] * microbatches, [{}] * microbatches)
    schedule._initialize_stage = schedule._maybe_compute_loss = lambda *_: None
    schedule._maybe_get_loss = schedule._update_losses = lambda *_: None
    schedule.scale_grads = schedule._has_backward = True
    schedule._step_microbatches()
    return stage.actions


def torch_order(name: str, rank: int, ranks: int, microbatches: int, local: int) -> list[Action]:
    """Return the order that torch's class of several stages a rank computes."""
    kind = SEVERAL[name]
    schedule = kind.__new__(kind)
    schedule._n_microbatches = microbatches
    schedule.pp_group_size, schedule.n_local_stages, schedule._stages = ranks, local, [None] * local
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    schedule.num_stages = ranks * local
    return [
        Action(one.stage_index, one.computation_type.value, one.microbatch_index)
        for one in schedule._calculate_single_rank_operations(rank)
        if one is not None
    ]


def stages_a_rank(name: str, wanted: int) -> int:
    return {"gpipe": 1, "1f1b": 1, "zbvzerobubble": 2}.get(name, wanted)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches", "local"), [(2, 2, 1), (2, 8, 2), (3, 6, 3), (4, 8, 2)])
def test_orders_are_torchs(name: str, ranks: int, microbatches: int, local: int) -> None:
    local = stages_a_rank(name, local)
    for rank, actions in enumerate(order_of(name, ranks, microbatches, local)):
        if name in SINGLE:
            assert list(actions) == torch_does(name, rank, ranks, microbatches)
        else:
            assert list(actions) == torch_order(name, rank, ranks, microbatches, local)


def even(stages: int, microbatches: int, backward: float = 2.0) -> list[StageTimes]:
    return [StageTimes((1.0,) * microbatches, (backward,) * microbatches)] * stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "loopedbfs", "interleaved1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_equal_stages_wait_as_the_formula_says(name: str, ranks: int, microbatches: int) -> None:
    step = play(order_of(name, ranks, microbatches), even(ranks, microbatches))
    assert step.bubble == pytest.approx(even_bubble(ranks, microbatches))
    assert step.step_seconds == pytest.approx(3.0 * (microbatches + ranks - 1))


@pytest.mark.parametrize("local", [1, 2, 4])
def test_interleaved_stages_wait_less(local: int) -> None:
    """Their bubble is that of the whole divided by the stages of a rank (Narayanan et al., 2021)."""
    ranks, microbatches = 4, 8
    thin = [StageTimes((1.0 / local,) * microbatches, (2.0 / local,) * microbatches)] * (ranks * local)
    step = play(order_of("interleaved1f1b", ranks, microbatches, local), thin)
    wasted = step.step_seconds / (3.0 * microbatches) - 1
    assert wasted == pytest.approx((ranks - 1) / (local * microbatches))


def test_halves_of_backward_fill_the_wait() -> None:
    ranks, microbatches = 4, 8
    plain = play(order_of("interleaved1f1b", ranks, microbatches), even(ranks, microbatches))
    split = play(order_of("interleavedzerobubble", ranks, microbatches), even(ranks, microbatches))
    assert split.busy_seconds == pytest.approx(plain.busy_seconds)
    assert split.step_seconds < plain.step_seconds - 2.0


def test_two_stages_by_hand() -> None:
    """1F1B, transfers of 0.5 s and updates: each number was drawn on paper."""
    first = StageTimes((1.0, 1.0), (2.0, 2.0), send_forward=(0.5, 0.5))
    last = StageTimes((3.0, 3.0), (4.0, 4.0), send_backward=(0.5, 0.5))
    step = play(order_of("1f1b", 2, 2), [first, last], [0.25, 1.0])
    # The first forward pass starts at 0.25, its output arrives at 1.75; the last stage is then never idle.
    assert step.ends == pytest.approx((1.75 + 14.0 + 0.5 + 2.0, 1.75 + 14.0))
    assert step.busy_seconds == pytest.approx((6.25, 15.0))
    assert step.bubble == pytest.approx(1 - 21.25 / (2 * 18.25))


def test_messages_queue_on_their_link() -> None:
    stages = [
        StageTimes((1.0,) * 4, (1.0,) * 4, send_forward=(3.0,) * 4),
        StageTimes((1.0,) * 4, (1.0,) * 4),
    ]
    step = play(order_of("gpipe", 2, 4), stages)
    assert step.ends[1] == pytest.approx(1.0 + 4 * 3.0 + 1.0 + 4.0)


def test_impossible_orders_are_refused() -> None:
    times = even(2, 1)
    backward_first = ((Action(0, BACKWARD, 0), Action(0, FORWARD, 0)), order_of("1f1b", 2, 1)[1])
    with pytest.raises(ValueError, match="wait for each other"):
        play(backward_first, times)
    with pytest.raises(ValueError, match="must do each"):
        play(((Action(0, FORWARD, 0),), *order_of("1f1b", 2, 1)[1:]), times)
    with pytest.raises(ValueError, match="no schedule of"):
        order_of("dualpipev", 2, 4)
    with pytest.raises(ValueError, match="one stage a rank"):
        order_of("1F1B", 2, 4, 2)
    with pytest.raises(ValueError, match="two stages a rank"):
        order_of("ZBVZeroBubble", 2, 4)
    with pytest.raises(ValueError, match="multiple of 2"):
        order_of("Interleaved1F1B", 2, 5)


def test_how_many_microbatches_are_kept() -> None:
    assert most_in_flight(order_of("GPipe", 3, 8), 3) == (8, 8, 8)
    assert most_in_flight(order_of("1F1B", 3, 8), 3) == (3, 2, 1)
    assert most_in_flight(order_of("1F1B", 3, 2), 3) == (2, 2, 1)


# ------------------------------------------------------------- another way: longest paths


def longest_paths(order: Order, stages: Sequence[StageTimes], updates: Sequence[float]) -> tuple[float, ...]:
    """When each rank is done: the longest path to its last action, by relaxing all edges until none moves."""
    rank_of = {a.stage: rank for rank, actions in enumerate(order) for a in actions}
    number = {a: i for i, a in enumerate(a for actions in order for a in actions)}
    messages: dict[tuple[int, int], list[Action]] = {}
    end = [0.0] * len(number)
    sent: dict[Action, float] = {}

    def takes(a: Action) -> float:
        times = stages[a.stage]
        whole = times.forward if a.kind == FORWARD else times.backward
        return whole[a.microbatch] * (0.5 if a.kind in (INPUT_GRADIENT, WEIGHT_GRADIENT) else 1.0)

    def feeds(a: Action) -> Action | None:
        if a.kind == FORWARD:
            return Action(a.stage - 1, FORWARD, a.microbatch) if a.stage else None
        if a.kind == WEIGHT_GRADIENT or a.stage == len(stages) - 1:
            return None
        return Action(a.stage + 1, a.kind, a.microbatch)

    for actions in order:
        for a in actions:
            to = a.stage + (1 if a.kind == FORWARD else -1)
            if a.kind != WEIGHT_GRADIENT and to in rank_of and rank_of[to] != rank_of[a.stage]:
                messages.setdefault((rank_of[a.stage], rank_of[to]), []).append(a)
    moved = True
    while moved:
        before = list(end)
        for queue in messages.values():
            free = 0.0
            for a in queue:
                times = stages[a.stage]
                send = times.send_forward if a.kind == FORWARD else times.send_backward
                free = max(free, end[number[a]]) + (send[a.microbatch] if send else 0.0)
                sent[a] = free
        for rank, actions in enumerate(order):
            clock = updates[rank]
            for a in actions:
                fed = feeds(a)
                ready = 0.0 if fed is None else sent.get(fed, end[number[fed]])
                clock = end[number[a]] = max(clock, ready) + takes(a)
        moved = end != before
    return tuple(max(end[number[a]] for a in actions) for actions in order)


seconds = st.floats(0.0, 5.0, allow_subnormal=False)


@st.composite
def pipelines(draw: Any) -> tuple[Order, list[StageTimes], list[float]]:
    name = draw(st.sampled_from(SCHEDULES))
    ranks, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    microbatches = ranks * rounds
    local = stages_a_rank(name, draw(st.integers(1, 3)))
    one = st.lists(seconds, min_size=microbatches, max_size=microbatches).map(tuple)
    stages = [StageTimes(draw(one), draw(one), draw(one), draw(one)) for _ in range(ranks * local)]
    updates = draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    return order_of(name, ranks, microbatches, local), stages, updates


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_played_as_longest_paths(drawn: tuple[Order, list[StageTimes], list[float]]) -> None:
    order, stages, updates = drawn
    step = play(order, stages, updates)
    assert step.ends == pytest.approx(longest_paths(order, stages, updates))
    assert step.step_seconds == max(step.ends)
    for rank, actions in enumerate(order):
        own = {a.stage for a in actions}
        works = math.fsum(sum(stages[s].forward) + sum(stages[s].backward) for s in own) + updates[rank]
        assert step.busy_seconds[rank] == pytest.approx(works)
        assert step.step_seconds >= works - 1e-9
    assert -1e-9 <= step.bubble <= 1


@settings(max_examples=30, deadline=None)
@given(pipelines(), st.floats(0.1, 10.0))
def test_seconds_are_only_a_unit(drawn: tuple[Order, list[StageTimes], list[float]], factor: float) -> None:
    order, stages, updates = drawn

    def scaled(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * factor for value in values)

    slower = [
        StageTimes(
            scaled(one.forward), scaled(one.backward), scaled(one.send_forward), scaled(one.send_backward)
        )
        for one in stages
    ]
    plain, long = play(order, stages, updates), play(order, slower, [u * factor for u in updates])
    assert long.step_seconds == pytest.approx(plain.step_seconds * factor)
    assert long.bubble == pytest.approx(plain.bubble, abs=1e-9)

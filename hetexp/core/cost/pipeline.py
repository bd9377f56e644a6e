"""Simulates the schedule of a pipeline, action by action, to predict its step. Pure functions.

Each rank does its actions in the order of the schedule, each as soon as its input is there: the output of the
previous stage for a forward pass, the gradient from the next stage for a backward pass. Messages between two
ranks travel one at a time in each direction, while the ranks go on computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"
"""torch's letters; `B` is a whole backward pass, `I` and `W` are its two halves."""
INPUT_GRADIENT_SHARE = 0.5
"""Fraction of a backward pass: the gradients of inputs and of weights are about the same work."""

Schedule = Literal["gpipe", "1f1b", "loopedbfs", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble"]
SCHEDULES: tuple[Schedule, ...] = (
    "gpipe",
    "1f1b",
    "loopedbfs",
    "interleaved1f1b",
    "interleavedzerobubble",
    "zbvzerobubble",
)
"""Schedules of `torch.distributed.pipelining` that can be simulated. Rank s modulo the number of ranks has
stage s. ZBV has two stages on each rank, and its second stages go through the ranks backwards."""


@dataclass(frozen=True)
class Action:
    """One action of a rank."""

    stage: int
    kind: str
    """`F`, `B`, `I` or `W`."""
    microbatch: int


@dataclass(frozen=True)
class StageTimes:
    """The seconds of one stage, with an entry for each microbatch."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send_forward: tuple[float, ...] = ()
    """From the end of its forward pass until the next stage has the output; empty: no time."""
    send_backward: tuple[float, ...] = ()
    """From the end of its backward pass until the previous stage has the gradient."""


@dataclass(frozen=True)
class PipelineStep:
    """A simulated step."""

    step_seconds: float
    busy_seconds: tuple[float, ...]
    """Each rank's computation, including the update."""
    ends: tuple[float, ...]
    """End of each rank's last action."""

    @property
    def bubble(self) -> float:
        """Return the fraction of all ranks' time in which nothing is computed."""
        total = len(self.busy_seconds) * self.step_seconds
        return 1 - sum(self.busy_seconds) / total if total else 0.0


Order = tuple[tuple[Action, ...], ...]
"""Each rank's actions."""


def schedule_name(name: str) -> Schedule:
    """Return a schedule's name in our spelling; torch takes any case (`1F1B`, `GPipe`).

    Raises:
        ValueError: it cannot be simulated.
    """
    for schedule in SCHEDULES:
        if schedule == name.replace("_", "").lower():
            return schedule
    raise ValueError(f"no schedule of {', '.join(SCHEDULES)}: {name}")


def order_of(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Order:
    """Return the actions of each rank in torch's schedule of this name.

    Args:
        schedule: any of `SCHEDULES`, in torch's spelling or ours.
        stages_per_rank: above 1 only with interleaved schedules.

    Raises:
        ValueError: the schedule is unknown, or does not allow these numbers.
    """
    name = schedule_name(schedule)
    if min(num_ranks, num_microbatches, stages_per_rank) < 1:
        raise ValueError("ranks, microbatches and stages must each be 1 or more")
    ranks = range(num_ranks)
    if name in ("gpipe", "1f1b"):
        if stages_per_rank > 1:
            raise ValueError(f"{name} has one stage a rank, not {stages_per_rank}")
        ahead = [num_microbatches if name == "gpipe" else num_ranks - rank for rank in ranks]
        return tuple(_one_stage(rank, min(ahead[rank], num_microbatches), num_microbatches) for rank in ranks)
    if name == "loopedbfs":
        return tuple(_looped(rank, num_ranks, stages_per_rank, num_microbatches) for rank in ranks)
    if name == "zbvzerobubble":
        if stages_per_rank != 2:
            raise ValueError(f"{name} has two stages a rank, not {stages_per_rank}")
        return tuple(_zbv(rank, num_ranks, num_microbatches) for rank in ranks)
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        raise ValueError(f"{name} needs a multiple of {rounds} microbatches, not {num_microbatches}")
    split = name == "interleavedzerobubble"
    return tuple(_interleaved(r, num_ranks, stages_per_rank, num_microbatches, split) for r in ranks)


def play(
    order: Sequence[Sequence[Action]], stages: Sequence[StageTimes], updates: Sequence[float] = ()
) -> PipelineStep:
    """Simulate one step of many that follow one another.

    A step ends once the last rank has all its gradients, for which all ranks wait. Every rank begins the next
    step after the update of its own weights. The result is the time from step to step.

    Args:
        order: each rank's actions.
        stages: of all ranks together, by their number.
        updates: each rank's seconds of the optimizer's step.

    Raises:
        ValueError: the order deadlocks, or is incomplete.
    """
    return PreparedOrder(order, [len(stage.forward) for stage in stages]).play(stages, updates)


class PreparedOrder:
    """An order whose actions are sorted by their dependencies, for simulations with different times.

    Args:
        order: each rank's actions.
        counts: microbatches of each stage.

    Raises:
        ValueError: the order deadlocks, or is incomplete.
    """

    def __init__(self, order: Sequence[Sequence[Action]], counts: Sequence[int]) -> None:
        _check_complete(order, counts)
        self._num_ranks = len(order)
        self._kinds = sorted({action.kind for actions in order for action in actions})
        self._rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
        self._slots: dict[tuple[str, int, int] | None, int] = {None: 0}
        """(F or B, waiting stage, microbatch) → slot of the time at which it arrives; slot 0 is the start."""
        self._links: dict[tuple[int, int], int] = {}
        self._row: list[tuple[int, int, int, int, int, int, int]] = []
        """(rank, index of stage and kind in the times, microbatch, slot that it waits for, slot of its result
        or −1, index of its message in the messages, its link or −1 within a rank)"""
        done: set[Action] = set()
        at = [0] * len(order)
        waiting = True
        while waiting:
            waiting = False
            for rank, actions in enumerate(order):
                while at[rank] < len(actions):
                    action = actions[at[rank]]
                    needed = self._needed(action, done, len(counts) - 1)
                    if needed is None:
                        break
                    self._add(rank, action, needed)
                    at[rank] += 1
                    done.add(action)
                    waiting = True
        if any(position < len(actions) for position, actions in zip(at, order, strict=True)):
            raise ValueError("the ranks wait for each other for ever: the order cannot be done")

    def play(self, stages: Sequence[StageTimes], updates: Sequence[float] = ()) -> PipelineStep:
        """Simulate one step, as the function `play` does."""
        begins = list(updates) or [0.0] * self._num_ranks
        clocks, busy = list(begins), list(begins)
        arrivals, free = [0.0] * len(self._slots), [0.0] * len(self._links)
        times = [_seconds(kind, stage) for stage in stages for kind in self._kinds]
        messages = [takes for stage in stages for takes in (stage.send_forward, stage.send_backward)]
        for rank, place, microbatch, needed, result, message, link in self._row:
            seconds = times[place][microbatch]
            now = max(clocks[rank], arrivals[needed]) + seconds
            clocks[rank] = now
            busy[rank] += seconds
            if result < 0:
                continue
            if link >= 0:
                takes = messages[message]
                now = max(now, free[link]) + (takes[microbatch] if takes else 0.0)
                free[link] = now
            arrivals[result] = now
        return PipelineStep(max(clocks), tuple(busy), tuple(clocks))

    def _needed(self, action: Action, done: set[Action], last: int) -> int | None:
        """Return the slot that an action waits for; `None` if no action fills it yet."""
        forward = action.kind == FORWARD
        if not forward:
            before = INPUT_GRADIENT if action.kind == WEIGHT_GRADIENT else FORWARD
            if Action(action.stage, before, action.microbatch) not in done:
                return None
            if action.kind == WEIGHT_GRADIENT:
                return 0
        if (forward and action.stage == 0) or (not forward and action.stage == last):
            return 0
        return self._slots.get((FORWARD if forward else BACKWARD, action.stage, action.microbatch))

    def _add(self, rank: int, action: Action, needed: int) -> None:
        """Append an action; its result travels to the stage that waits for it."""
        forward = action.kind == FORWARD
        place = action.stage * len(self._kinds) + self._kinds.index(action.kind)
        to = action.stage + (1 if forward else -1)
        result, link = -1, -1
        if action.kind != WEIGHT_GRADIENT and to in self._rank_of:
            key = (FORWARD if forward else BACKWARD, to, action.microbatch)
            result = self._slots[key] = len(self._slots)
            if self._rank_of[to] != rank:
                link = self._links.setdefault((rank, self._rank_of[to]), len(self._links))
        message = 2 * action.stage + (0 if forward else 1)
        self._row.append((rank, place, action.microbatch, needed, result, message, link))


def most_in_flight(order: Sequence[Sequence[Action]], num_stages: int) -> tuple[int, ...]:
    """Return for each stage the most microbatches between their forward and their backward pass.

    The stage keeps the activations of so many microbatches.
    """
    most = [0] * num_stages
    for actions in order:
        now = [0] * num_stages
        for action in actions:
            if action.kind == FORWARD:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind in (BACKWARD, WEIGHT_GRADIENT):  # the second half ends it
                now[action.stage] -= 1
    return tuple(most)


def _one_stage(rank: int, ahead: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of a rank that does so many forward passes before its first backward pass."""
    actions = [Action(rank, FORWARD, index) for index in range(ahead)]
    for index in range(num_microbatches):
        actions.append(Action(rank, BACKWARD, index))
        if ahead + index < num_microbatches:
            actions.append(Action(rank, FORWARD, ahead + index))
    return tuple(actions)


def _looped(rank: int, num_ranks: int, num_local: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of breadth-first pipelines (Lamy-Poirier, 2022): a stage's microbatches together."""
    stages = [rank + num_ranks * local for local in range(num_local)]
    forward = [Action(stage, FORWARD, index) for stage in stages for index in range(num_microbatches)]
    return (*forward, *(Action(a.stage, BACKWARD, a.microbatch) for a in reversed(forward)))


def _interleaved(
    rank: int, num_ranks: int, num_local: int, num_microbatches: int, split: bool
) -> tuple[Action, ...]:
    """Return the actions of interleaved stages (Narayanan et al., 2021), each round of them 1F1B.

    Args:
        split: whether the weights' gradients are computed later, when the rank would wait (Qi et al., Zero
            bubble pipeline parallelism, 2024).
    """
    a_round = num_microbatches // max(1, num_microbatches // num_ranks)
    total = num_local * num_microbatches

    def places(backwards: bool) -> list[tuple[int, int]]:
        """Return (stage, microbatch) in turn."""
        counts: dict[int, int] = {}
        pairs = []
        for op in range(total):
            local = op // a_round % num_local
            stage = rank + num_ranks * (num_local - 1 - local if backwards else local)
            pairs.append((stage, counts.get(stage, 0)))
            counts[stage] = counts.get(stage, 0) + 1
        return pairs

    forward, backward = places(False), places(True)
    hops = num_ranks - 1 - rank
    ahead = min((num_local - 1) * a_round + (hops if split else 2 * hops), total)
    actions = [Action(stage, FORWARD, index) for stage, index in forward[:ahead]]
    later = iter(backward)
    for done, (stage, index) in enumerate(backward):
        if ahead + done < total:
            next_stage, next_index = forward[ahead + done]
            actions.append(Action(next_stage, FORWARD, next_index))
        actions.append(Action(stage, INPUT_GRADIENT if split else BACKWARD, index))
        if split and done >= rank:
            stage, index = next(later)
            actions.append(Action(stage, WEIGHT_GRADIENT, index))
    if split:
        actions += [Action(stage, WEIGHT_GRADIENT, index) for stage, index in later]
    return tuple(actions)


def _zbv(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of ZBV (Qi et al., 2024, section 6), cut from those of enough microbatches."""
    out, back = rank, 2 * num_ranks - 1 - rank
    expected = max(2 * num_ranks - 1, num_microbatches)
    counts: dict[tuple[int, str], int] = {}
    actions: list[Action] = []

    def count(stage: int, kind: str) -> int:
        return counts.get((stage, kind), 0)

    def do(stage: int, kinds: str) -> None:
        for kind in kinds:
            actions.append(Action(stage, kind, count(stage, kind)))
            counts[stage, kind] = count(stage, kind) + 1

    hops = num_ranks - rank
    for _ in range(2 * hops - 1):
        do(out, "F")
    for _ in range(rank):
        do(back, "F")
        do(out, "F")
    for _ in range(hops):
        do(back, "FIW")
    while count(back, "F") < count(out, "F") or count(out, "F") < expected:
        do(out, "FIW" if count(out, "F") < expected else "IW")
        do(back, "FIW")
    for _ in range(rank):
        do(out, "I")
        do(back, "I")
    for _ in range(hops):
        do(out, "IW")
    for stage in (back, out):
        while count(stage, "W") < count(stage, "I"):
            do(stage, "W")
    return tuple(action for action in actions if action.microbatch < num_microbatches)


def _check_complete(order: Sequence[Sequence[Action]], counts: Sequence[int]) -> None:
    """Check that an order has every microbatch's forward and backward pass of every stage once.

    Raises:
        ValueError: it does not.
    """
    done = sorted((a.stage, a.microbatch, a.kind) for actions in order for a in actions)
    halves = {kind for _, _, kind in done} & {INPUT_GRADIENT, WEIGHT_GRADIENT}
    kinds = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) if halves else (BACKWARD, FORWARD)
    expected = sorted((s, m, k) for s, count in enumerate(counts) for m in range(count) for k in kinds)
    if done != expected:
        raise ValueError("the order must do each microbatch's forward and backward pass of each stage once")


def _seconds(kind: str, times: StageTimes) -> Sequence[float]:
    """Return the seconds of each microbatch's action of this kind."""
    if kind == FORWARD:
        return times.forward
    if kind == BACKWARD:
        return times.backward
    part = INPUT_GRADIENT_SHARE if kind == INPUT_GRADIENT else 1 - INPUT_GRADIENT_SHARE
    return [seconds * part for seconds in times.backward]

"""A walk that goes on from a state has the samples of one that begins at the first, or it does not count."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from hetexp.data.sampler import Position
from hetexp.data.streams.passes import AGAIN, MARKS
from hetexp.data.streams.stream import Generated, Stream, StreamSampler

SEED = 3


class Counted(IterableDataset[Any]):
    """Numbers with noise of all three global generators, which goes on from a state.

    Args:
        count: samples of a pass.
        buffer: samples of a shuffle buffer whose content is no part of the state; 0: none.
    """

    def __init__(self, count: int, buffer: int = 0) -> None:
        self.count, self.buffer = count, buffer
        self.epoch, self.taken, self._begin = 0, 0, 0
        self.made: list[int] = []
        """Shared by copies."""

    def __deepcopy__(self, memo: Any) -> Counted:
        other = type(self)(self.count, self.buffer)
        other.epoch, other.made = self.epoch, self.made
        return other

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin = state["taken"]

    def __iter__(self) -> Iterator[Any]:
        self.taken, self._begin = self._begin, 0
        held: list[Any] = []
        while self.taken < self.count:
            self.taken += 1
            self.made.append(self.taken)
            noise = random.random() + np.random.rand() + torch.rand(()).item()
            held.append(1000.0 * self.epoch + 10 * self.taken + noise)
            if len(held) > self.buffer:
                yield held.pop(random.randrange(len(held)))
        yield from held


class Tensors(Counted):
    """A state that JSON cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"taken": torch.tensor(self.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin = int(state["taken"])


class Without(Counted):
    """It has the methods of a base class that cannot do it."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


def stream_of(source: Any, seed: int = SEED) -> Stream:
    stream = Stream(source)
    stream.seed = seed
    stream.first(2)  # as all ranks do before they train
    return stream


def walked(
    stream: Stream, position: Position, steps: int, size: int, drop_last: bool = False
) -> tuple[list[list[float]], Position]:
    sampler, batches = StreamSampler(stream, size, stream.seed, drop_last, max_epochs=3), []
    for _ in range(steps):
        indices, position = sampler.batch(position)
        if not len(indices):
            break
        batches.append(stream.__getitems__(indices.tolist()))
    return batches, position


@example(count=4, size=1, steps=3, buffer=1, drop_last=False)
@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(2, 90),
    size=st.integers(1, 40),
    steps=st.integers(1, 12),
    buffer=st.sampled_from([0, 0, 1, 7]),
    drop_last=st.booleans(),
)
def test_a_saved_walk_goes_on_as_the_whole_one(
    count: int, size: int, steps: int, buffer: int, drop_last: bool
) -> None:
    size = min(size, count)
    first = stream_of(Counted(count, buffer))
    _, position = walked(first, Position(), steps, size, drop_last)
    saved = json.loads(json.dumps(first.saved_at(position)))
    rest, _ = walked(first, position, 100, size, drop_last)
    again = stream_of(Counted(count, buffer))
    again.restore(position, saved)
    assert walked(again, position, 100, size, drop_last)[0] == rest


@pytest.mark.parametrize("size", [1, 5, 16, 50])
def test_it_reads_a_few_samples_again_and_none_before_them(size: int) -> None:
    first = stream_of(Counted(1000))
    _, position = walked(first, Position(), 400 // size, size)
    source = Counted(1000)
    again = stream_of(source)
    again.restore(position, first.saved_at(position))
    source.made.clear()
    walked(again, position, 1, size)
    read_again = [number for number in source.made if number <= position.offset]
    assert read_again == list(range(position.offset - len(read_again) + 1, position.offset + 1))
    assert AGAIN - 1 <= len(read_again) < AGAIN + size
    assert len(source.made) == len(read_again) + size + 1


def test_a_buffer_that_is_lost_makes_it_walk() -> None:
    first = stream_of(Counted(300, buffer=20))
    _, position = walked(first, Position(), 5, 20)
    source = Counted(300, buffer=20)
    again = stream_of(source)
    again.restore(position, first.saved_at(position))
    source.made.clear()
    assert walked(again, position, 9, 20)[0] == walked(first, position, 9, 20)[0]
    assert set(range(23, position.offset)) <= set(source.made)


def test_another_seed_makes_it_walk() -> None:
    first = stream_of(Counted(100))
    _, position = walked(first, Position(), 3, 10)
    other, whole = stream_of(Counted(100), seed=4), stream_of(Counted(100), seed=4)
    other.restore(position, first.saved_at(position))
    walked(whole, Position(), 3, 10)
    assert walked(other, position, 5, 10)[0] == walked(whole, position, 5, 10)[0]


@pytest.mark.parametrize("kind", [Tensors, Without])
def test_what_cannot_be_saved_walks(kind: type[Counted]) -> None:
    stream = stream_of(kind(100))
    _, position = walked(stream, Position(), 3, 10)
    assert stream.saved_at(position) is None
    again = stream_of(kind(100))
    again.restore(position, None)
    assert walked(again, position, 3, 10)[0] == walked(stream, position, 3, 10)[0]


def test_a_step_back_needs_no_walk_either() -> None:
    source = Counted(1000)
    stream = stream_of(source)
    _, position = walked(stream, Position(), 20, 20)
    ahead, _ = walked(stream, position, 3, 20)
    source.made.clear()
    assert walked(stream, position, 3, 20)[0] == ahead
    assert len(source.made) <= AGAIN + 3 * 20 + 3


def test_marks_are_few() -> None:
    stream = stream_of(Counted(1000))
    walked(stream, Position(), 200, 5)
    kept = [offset for offset in range(1001) if stream.marks.last(0, offset) is not None]
    assert len(kept) == MARKS
    assert kept[-1] == 1000


def counting(count: int, step: int = 1) -> Iterator[int]:
    yield from range(0, count, step)


def test_each_pass_calls_a_generator_function_again() -> None:
    stream = Stream(Generated(partial(counting, 10, step=2)))
    assert walked(stream, Position(), 4, 3)[0] == [[0, 2, 4], [6, 8], [0, 2, 4], [6, 8]]

"""One walk through the iterable of a stream, from its first sample or from a mark of an earlier walk.

An iterable with `state_dict` and `load_state_dict` (the protocol of torchdata's `StatefulDataLoader`, and of
`datasets.IterableDataset`) can go on without a walk. Not each of them goes on exactly: a shuffle buffer may
be filled again. So the last samples before the position are read again and compared, and only if they are
those of the earlier walk, it counts.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from hetexp.core.errors import logged
from hetexp.data.streams.random_numbers import (
    keeping_random_states,
    random_states,
    seed_host,
    set_random_states,
)

AGAIN = 16
"""Samples before a position that are read again and compared, fewer if a walk has just begun."""
NEAR = 64
"""Samples that are soon read from the first one on, rather than trust fewer than `AGAIN` compared ones."""
COMPARED = 4096
"""Most elements of a tensor that are compared."""
MARKS = 64
"""Most marks that are kept: those of the positions that a loader has read ahead of the training."""


@dataclass(frozen=True)
class Mark:
    """The state of a walk shortly before a position, and the digests of the samples between them."""

    start: int
    """Offset of the state in its epoch."""
    state: Any
    """What the iterable's `state_dict` returned."""
    random: Any
    """States of the random number generators; `None` if the iterable draws no numbers."""
    digests: tuple[float, ...]
    lead: tuple[float, ...] = ()
    """Digests of the samples before `start` that had been read ahead, from the position before on."""


class Marks:
    """The newest marks of a stream, by epoch and offset."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, int], Mark] = {}

    def add(self, epoch: int, offset: int, mark: Mark) -> None:
        """Keep a mark, and drop the oldest one if there are too many."""
        self._marks.pop((epoch, offset), None)
        self._marks[epoch, offset] = mark
        while len(self._marks) > MARKS:
            del self._marks[next(iter(self._marks))]

    def last(self, epoch: int, offset: int) -> Mark | None:
        """Return the mark of the samples right before a position."""
        return self._marks.get((epoch, offset))

    def find(self, epoch: int, offset: int) -> Mark | None:
        """Return a mark from which `AGAIN` samples are read again, or as many as the marks allow.

        Near the epoch's start these must be `AGAIN`: one sample or two may be equal by chance, although a
        shuffle buffer was lost.
        """
        mark = self._marks.get((epoch, offset))
        while mark is not None and len(mark.digests) < AGAIN:
            before = self._marks.get((epoch, mark.start - len(mark.lead)))
            if before is None:
                break
            mark = replace(before, digests=before.digests + mark.lead + mark.digests)
        return None if mark is not None and offset < NEAR and len(mark.digests) < AGAIN else mark


class Pass:
    """One walk through an iterable, with random numbers that the seed and the epoch determine.

    Args:
        mark: where it begins; `None`: at the first sample. The iterable itself does not notice: a copy walks.
    """

    def __init__(self, source: Iterable[Any], epoch: int, seed: int, mark: Mark | None = None) -> None:
        self.epoch, self.may_mark = epoch, is_stateful(source)
        self._source, self._seed, self._mark = source, seed, mark
        self._iterator: Iterator[Any] | None = None
        self._states: Any = None if mark is None else mark.random
        # Such samples draw no random numbers, and a thread may not touch the training's.
        self._draws = not getattr(type(source), "prefetchable", False)

    def take(self, most: int) -> list[Any]:
        """Return the next samples, fewer at the end."""
        own: AbstractContextManager[None] = self._own_numbers() if self._draws else nullcontext()
        with own:
            if self._iterator is None:
                self._iterator = self._begun()
            return list(islice(self._iterator, most))

    def state(self) -> tuple[Any, Any] | None:
        """Return the states of the iterable and of the generators; `None` if it has none yet, or at all."""
        if self._iterator is None:
            return None
        with logged("the stream is read from its first sample on resume, as its `state_dict` failed"):
            return copy.deepcopy(self._source.state_dict()), self._states  # type: ignore[attr-defined]
        self.may_mark = False
        return None

    def _begun(self) -> Iterator[Any]:
        if self._mark is not None:
            self._source = copy.deepcopy(self._source)
        set_epoch = getattr(self._source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        if self._mark is not None:
            self._source.load_state_dict(copy.deepcopy(self._mark.state))  # type: ignore[attr-defined]
        return iter(self._source)

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        with keeping_random_states():
            if self._states is None:
                seeds = np.random.SeedSequence(self._seed, spawn_key=(self.epoch, 2))  # no order has this key
                seed_host(int(seeds.generate_state(1, np.uint64)[0] >> np.uint64(1)))
            else:
                set_random_states(self._states)
            yield
            self._states = random_states()


def is_stateful(source: Any) -> bool:
    """Return whether an iterable says that it can go on from a state."""
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


def resumed(source: Iterable[Any], epoch: int, seed: int, mark: Mark) -> tuple[Pass, list[Any]] | None:
    """Return a walk that has gone on from a mark to its position, and the samples that it has read again.

    Returns `None` if they are not those of the earlier walk, or the iterable cannot go on.
    """
    samples = None
    with logged("the stream does not go on from a mark, and is read from its first sample", logging.INFO):
        walk = Pass(source, epoch, seed, mark)
        samples = walk.take(len(mark.digests))
    if samples is None:
        return None
    same = len(samples) == len(mark.digests) and all(map(alike, map(digest, samples), mark.digests))
    return (walk, samples) if same else None


def packed(mark: Mark, seed: int) -> dict[str, Any] | None:
    """Return a mark as plain JSON types for a checkpoint; `None` if the iterable's state has others."""
    try:
        plain = json.loads(json.dumps(mark.state))
    except (TypeError, ValueError):
        return None
    if plain != mark.state:
        return None
    random = None
    if mark.random is not None:
        python, (name, key, *rest), torch_state = mark.random
        coded = base64.b64encode(torch_state.numpy().tobytes()).decode()
        random = {"python": python, "numpy": [name, key.tolist(), *rest], "torch": coded}
    return {"start": mark.start, "state": plain, "random": random, "digests": mark.digests, "seed": seed}


def unpacked(raw: Mapping[str, Any]) -> Mark:
    """Return the mark that `packed` described."""
    random, states = raw["random"], None
    if random is not None:
        version, words, second = random["python"]
        name, key, *rest = random["numpy"]
        content = bytearray(base64.b64decode(random["torch"]))
        states = (
            (version, tuple(words), second),
            (name, np.array(key, dtype=np.uint32), *rest),
            torch.frombuffer(content, dtype=torch.uint8),
        )
    return Mark(raw["start"], raw["state"], states, tuple(raw["digests"]))


def alike(digest: float, other: float) -> bool:
    """Return whether two digests are of the same sample, but for rounding."""
    return math.isclose(digest, other, rel_tol=1e-6, abs_tol=1e-9)


def digest(sample: Any) -> float:
    """Return a number of a sample that ranks compare; equal within rounding on any machine."""
    number = sum(math.sqrt(place + 2) * value for place, value in enumerate(_leaves(sample)))
    return number if math.isfinite(number) else 0.0


def _leaves(value: Any) -> Iterator[float]:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value.reshape(-1)[:COMPARED]).astype(np.float64))
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)[:COMPARED].to("cpu", torch.float64)
        yield float(flat.nan_to_num().abs() @ torch.linspace(1, math.pi, len(flat), dtype=torch.float64))
    elif isinstance(value, (bool, int, float)):
        yield float(value)
    elif isinstance(value, (str, bytes)):
        yield zlib.crc32(value.encode() if isinstance(value, str) else value) / 2**32
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)

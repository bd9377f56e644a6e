"""Streams as people bring them: data that can only be walked through."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from faulty import my_rank
from torch.utils.data import IterableDataset, get_worker_info

Sample = tuple[torch.Tensor, torch.Tensor]


class Rows(IterableDataset[Sample]):
    """Rows of 8 numbers and their class, shuffled in each pass and with noise, both by the global generators.

    Args:
        count: samples of a pass.
        first: number of the first one.
        by_worker: whether the rows are divided among a loader's processes, as torch's documentation shows.
        by_rank: whether they are divided among the ranks of `torch.distributed`.
        short: samples of a pass that are left out on rank 1.
        unseeded: whether the order is drawn by a generator without a seed.
    """

    facts = {"input_shape": [8], "num_classes": 3}

    def __init__(
        self,
        count: int = 77,
        first: int = 0,
        by_worker: bool = True,
        by_rank: bool = False,
        short: int = 0,
        unseeded: bool = False,
    ) -> None:
        self.count, self.first, self.by_worker, self.by_rank = count, first, by_worker, by_rank
        self.short, self.unseeded = short, unseeded
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        order = list(range(self.first, self.first + self.count))
        generator: Any = random.Random() if self.unseeded else random
        generator.shuffle(order)
        worker = get_worker_info() if self.by_worker else None
        if worker is not None:
            order = order[worker.id :: worker.num_workers]
        if self.by_rank and dist.is_initialized():
            order = order[dist.get_rank() :: dist.get_world_size()]
        if self.short and my_rank() == 1:
            order = order[: -self.short]
        for number in order:
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(8, generator=generator, dtype=torch.float64)
            noise = torch.from_numpy(np.random.randn(8)) + torch.randn(8)
            yield x + 0.1 * noise + 0.01 * self.epoch, x[:3].argmax()


class Sized(Rows):
    """Rows that say how many they are."""

    def __len__(self) -> int:
        return self.count


class Source:
    """Training and evaluation data, both streams."""

    def __init__(self, **options: Any) -> None:
        self.train, self.evaluation = Rows(**options), Rows(41, first=1000)
        self.facts = Rows.facts


class Stateful(IterableDataset[Sample]):
    """Rows in an order that the epoch decides, with noise by a global generator; it goes on from a state.

    Args:
        count: samples of a pass.
        buffer: samples of a shuffle buffer whose content is no part of the state; 0: none.
        writes: file that gets a line for each sample that is made.
    """

    facts = Rows.facts

    def __init__(self, count: int = 77, buffer: int = 0, writes: str | None = None) -> None:
        self.count, self.buffer, self.writes = count, buffer, writes
        self.epoch, self.taken, self._begin = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = state["taken"]

    def __iter__(self) -> Iterator[Sample]:
        self.taken, self._begin = self._begin, 0
        held: list[Sample] = []
        while self.taken < self.count:
            held.append(self._next())
            if len(held) > self.buffer:
                yield held.pop(random.randrange(len(held)))
        yield from held

    def _next(self) -> Sample:
        order = np.random.default_rng(self.epoch).permutation(self.count)
        number = int(order[self.taken])
        self.taken += 1
        if self.writes is not None:
            with open(self.writes, "a") as file:  # noqa: PTH123
                file.write(f"{my_rank()} {number}\n")
        x = torch.randn(8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        return x + 0.1 * torch.from_numpy(np.random.randn(8)), x[:3].argmax()


class StatefulSource:
    """A stream that goes on from a state as training data, and a stream as evaluation data."""

    facts = Rows.facts

    def __init__(self, **options: Any) -> None:
        self.train, self.evaluation = Stateful(**options), Rows(41, first=1000)


def generated(count: int = 77) -> Iterator[Sample]:
    """Yield rows; a pass after the first calls it again."""
    yield from Rows(count)


def streamed(count: int = 77) -> Any:
    """Return a stream, which only building shows."""
    return Rows(count)


generated.facts = streamed.facts = Rows.facts  # type: ignore[attr-defined]

"""Ranks as threads of one process, each with its own values, for tests and experiments."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from hetexp.comm.communicator import Communicator, ReduceOp
from hetexp.comm.exchange import Exchange
from hetexp.comm.pending import Pending

Result = TypeVar("Result")


class FakeCommunicator(Communicator):
    """One rank of a `FakeGroup`; reductions really combine the ranks' tensors."""

    def __init__(self, group: FakeGroup, rank: int) -> None:
        self.rank, self.world_size = rank, group.world_size
        self._group = group

    def all_reduce_async(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        return _FakePending(self._group, self.rank, tensor.clone(), op)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._group.values[self.rank] = tensor.clone()
        self._group.barrier.wait()
        gathered = [value.clone() for value in self._group.values]
        self._group.barrier.wait()  # no rank overwrites a value before all have read it
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self.all_gather(tensor)[source]

    def barrier(self) -> None:
        self._group.barrier.wait()


class _FakePending:
    def __init__(self, group: FakeGroup, rank: int, tensor: torch.Tensor, op: ReduceOp) -> None:
        self._group, self._rank, self._tensor, self._op = group, rank, tensor, op

    def wait(self) -> torch.Tensor:
        group = self._group
        group.values[self._rank] = self._tensor
        group.barrier.wait()
        stacked = torch.stack(group.values)
        result = stacked.sum(dim=0) if self._op == "sum" else stacked.amax(dim=0)
        group.barrier.wait()  # no rank overwrites a value before all have read it
        return result


class FakeExchange(Exchange):
    """Sums large tensors over the ranks of a communicator, usually a `FakeCommunicator`."""

    name = "fake"

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.world_size
        self._communicator = communicator

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._communicator.all_reduce(tensor))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._communicator.all_gather(tensor)


class FakeGroup:
    """A group of `world_size` ranks in one process."""

    def __init__(self, world_size: int, timeout_seconds: float = 30.0) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=timeout_seconds)
        self.values: list[torch.Tensor] = [torch.empty(0)] * world_size

    def run(self, function: Callable[[Communicator], Result]) -> list[Result]:
        """Call `function` once a rank, all at the same time, and return the results in rank order.

        Raises:
            Exception: the first one that a rank raised; the others then stop at their next collective.
        """

        def run_rank(rank: int) -> Result:
            try:
                return function(FakeCommunicator(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        # A collection in `torch.get_rng_state`, which holds a lock and lets other threads run, would deadlock
        # with another thread in it.
        gc.disable()
        try:
            with ThreadPoolExecutor(self.world_size) as pool:
                futures = [pool.submit(run_rank, rank) for rank in range(self.world_size)]
                errors = [e for e in (f.exception() for f in futures) if e is not None]
        finally:
            gc.enable()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]

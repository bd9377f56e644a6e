"""Collectives on small tensors: counts, metrics, decisions. Gradients travel through the strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from hetexp.comm.connections.pulse import Pulse
from hetexp.comm.connections.sockets import remembered, shut_all
from hetexp.core.errors import PeerLostError

ReduceOp = Literal["sum", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_HOST_TYPES = ("cpu", "cuda")
"""Device types that gloo reads and writes by itself; every other one is staged through the host."""
MOST_ASIDE_BYTES = 1 << 16
"""Of a host's tensor that is reduced on a stream of its own, through pinned memory."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> torch.Tensor:
        """Return the result, on the device of the tensor that was given."""
        ...


class Communicator(ABC):
    """What the training loop may ask of the other ranks."""

    rank: int
    world_size: int
    device = torch.device("cpu")
    """Where collectives read and write; tensors of other devices are brought there."""

    def apart(self) -> Communicator:
        """Return a communicator of the same ranks whose collectives have an order of their own.

        All ranks must call it together.
        """
        return self

    @abstractmethod
    def all_reduce_async(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start a reduction over all ranks; the same call must be made by each of them in the same order.

        The given tensor is left as it was. Only sums and maxima: a mean of integers differs by backend.

        Raises:
            PeerLostError: another rank is gone or did not come in time (here or in `wait`).
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order; all have one shape and type.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return one rank's tensor on all of them, bit for bit; all have one shape and type.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce over all ranks and return the result on the tensor's own device."""
        return self.all_reduce_async(tensor, op).wait()

    def meet(self) -> None:
        """Return once every rank has called it, however long it takes those that give signs of life.

        Raises:
            PeerLostError: a rank is gone or gives none.
        """
        self.barrier()

    def alive(self) -> None:  # noqa: B027 - a lone rank keeps no other waiting
        """Give the others a sign of life, from within work that takes its time."""

    def working(self) -> AbstractContextManager[None]:
        """Give the others signs of life while the block runs."""
        return nullcontext()

    def abandon(self) -> None:  # noqa: B027 - most communicators have no connections
        """Leave the other ranks in the midst of whatever they do with this one; no collective may follow.

        Ranks that wait for this one learn of it, and so does a thread of this rank that waits for them.
        """

    def close(self) -> None:  # noqa: B027 - most communicators hold nothing
        """Give up what the communicator holds; no collective may follow."""


class _Done:
    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        return self._result


class SoloCommunicator(Communicator):
    """A single rank, without others to talk to."""

    rank = 0
    world_size = 1

    def all_reduce_async(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        return _Done(tensor.clone())

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone()]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.clone()

    def barrier(self) -> None:
        return None


class ProcessGroupCommunicator(Communicator):
    """A process group of torch.distributed.

    Args:
        device: the rank's own: NCCL's collectives read and write there, gloo's on the CPU.
        pulse: how the ranks know that the others are alive where they work by themselves.
        group: of all ranks; `None`: the default one.
    """

    def __init__(self, device: torch.device, pulse: Pulse, group: dist.ProcessGroup | None = None) -> None:
        self._pulse, self._group = pulse, group
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        native = dist.get_backend(group) != "gloo"
        self._own_device = device
        self.device = device if native else torch.device("cpu")
        self._aside = torch.cuda.Stream(device) if self.device.type == "cuda" else None

    def apart(self) -> Communicator:
        limit = timedelta(seconds=self._pulse.timeout_seconds)
        with remembered():
            group = dist.new_group(backend=dist.get_backend(), timeout=limit)
        return ProcessGroupCommunicator(self._own_device, self._pulse, group)

    def all_reduce_async(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        if self._aside is not None and tensor.device.type == "cpu" and tensor.nbytes <= MOST_ASIDE_BYTES:
            return self._reduce_aside(tensor, op, self._aside)
        staged = stage(tensor, self.device)
        try:
            work = dist.all_reduce(staged, op=_OPS[op], group=self._group, async_op=True)
        except RuntimeError as error:
            raise peer_lost(error) from error
        return _Reduction(work, staged, tensor.device)

    def _reduce_aside(self, tensor: torch.Tensor, op: ReduceOp, stream: torch.cuda.Stream) -> Pending:
        """Reduce numbers of the host by a library that reads the device, without a wait for the device.

        On the stream of the passes, both copies would wait for all work that is queued there, twice a step.
        """
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())
        with torch.cuda.stream(stream):
            staged = pinned.to(self.device, non_blocking=True)
            try:
                work = dist.all_reduce(staged, op=_OPS[op], group=self._group, async_op=True)
                work.wait()  # the stream waits for it, not this process
            except RuntimeError as error:
                raise peer_lost(error) from error
            result = torch.empty_like(pinned, pin_memory=True).copy_(staged, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return _Aside(arrived, result)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        staged = stage(tensor, self.device)
        everyone = [torch.empty_like(staged) for _ in range(self.world_size)]
        try:
            dist.all_gather(everyone, staged, group=self._group)
        except RuntimeError as error:
            raise peer_lost(error) from error
        return [one.to(tensor.device) for one in everyone]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        staged = stage(tensor, self.device)
        try:
            dist.broadcast(staged, src=source, group=self._group)
        except RuntimeError as error:
            raise peer_lost(error) from error
        return staged.to(tensor.device)

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def meet(self) -> None:
        self._pulse.meet()

    def alive(self) -> None:
        self._pulse.beat()

    def working(self) -> AbstractContextManager[None]:
        return self._pulse.beating()

    def abandon(self) -> None:
        shut_all()
        self.close()

    def close(self) -> None:
        self._group = None
        if dist.is_initialized():
            dist.destroy_process_group()


class _Reduction:
    def __init__(self, work: dist.Work, staged: torch.Tensor, home: torch.device) -> None:
        self._work, self._staged, self._home = work, staged, home

    def wait(self) -> torch.Tensor:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
        return self._staged.to(self._home)


class _Aside:
    def __init__(self, arrived: torch.cuda.Event, result: torch.Tensor) -> None:
        self._arrived, self._result = arrived, result

    def wait(self) -> torch.Tensor:
        try:
            self._arrived.synchronize()
        except RuntimeError as error:
            raise peer_lost(error) from error
        return self._result


def stage(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of `tensor` that a group computing on `device` can reduce.

    gloo has no path for `xpu` and `mps` tensors and none for float64 there, so anything but the CPU's and,
    in place, CUDA's goes through the host.
    """
    home = device if device.type != "cpu" or tensor.device.type not in _HOST_TYPES else tensor.device
    return tensor.detach().to(home, copy=True).contiguous()


def peer_lost(error: RuntimeError) -> PeerLostError:
    """Tell a failed collective in one sentence; the cause is kept for the log."""
    first_line = str(error).partition("\n")[0]
    return PeerLostError(f"a collective failed because another rank is gone or late ({first_line})")

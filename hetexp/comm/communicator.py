"""Collectives on small tensors: counts, metrics, decisions. The strategy exchanges gradients."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from hetexp.comm.connections.pulse import Pulse
from hetexp.comm.connections.revocation import Revocation, forget_aborted
from hetexp.comm.connections.sockets import remembered, shut_all
from hetexp.comm.pending import Pending, RowExchange
from hetexp.core.errors import PeerLostError, SetupError

log = logging.getLogger(__name__)

ReduceOp = Literal["sum", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_HOST_TYPES = ("cpu", "cuda")
"""Device types that gloo reads and writes by itself; every other one is staged through the host."""
MOST_ASIDE_BYTES = 1 << 16
"""Largest host tensor that is reduced on a separate stream, through pinned memory."""

_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch's name for it since 2.13, which deprecates the other."""


class Communicator(ABC):
    """The training loop's collectives with the other ranks."""

    rank: int
    world_size: int
    device = torch.device("cpu")
    """Device on which collectives read and write; tensors of other devices are copied there."""
    revocation = Revocation()
    """Whether the ranks have given up their group."""

    def duplicate(self) -> Communicator:
        """Return a communicator of the same ranks with its own order of collectives; all ranks call it."""
        return self

    def duplicate_for_rows(self) -> Communicator:
        """Return a duplicate for many small sums and rows (`all_reduce_`, `all_gather_rows`)."""
        return self.duplicate()

    @abstractmethod
    def all_reduce_async(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start a reduction over all ranks, which all make the same calls in the same order.

        The tensor is left as it was. There are only sums and maxima: a mean of integers differs by backend.

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

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks.

        On a device of a vendor's library, the sum is only queued: later work on the current stream sees it.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        tensor.copy_(self.all_reduce(tensor))

    def all_gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return every rank's row [length] as one tensor [ranks, length] on the row's own device.

        On a device of a vendor's library, the rows are only queued, as in `all_reduce_`.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        return torch.stack(self.all_gather(row))

    def meet(self) -> None:
        """Return once every rank has called it, without a time limit for ranks that send heartbeats.

        Raises:
            PeerLostError: a rank is gone or sends no heartbeat.
        """
        self.barrier()

    def alive(self) -> None:  # noqa: B027 - for a lone rank no other waits
        """Send a heartbeat to the others from within long work."""

    def working(self) -> AbstractContextManager[None]:
        """Send heartbeats to the others while the block runs."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for waits for the device, as results of other ranks may not come there."""
        return nullcontext()

    def confirm(self) -> None:  # noqa: B027 - the collectives of most raise
        """Return if all results so far are right, which the host has read meanwhile.

        Raises:
            PeerLostError: another rank is gone, and they may be wrong.
        """

    def abandon(self) -> None:  # noqa: B027 - most communicators have no connections
        """Leave the other ranks, also in the midst of a collective; no collective may follow.

        Ranks that wait for this rank fail at once, and so does a thread of this rank that waits for them.
        """

    def close(self) -> None:  # noqa: B027 - most communicators hold nothing
        """Free the communicator's resources; no collective may follow."""


class _Done:
    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        return self._result


class SoloCommunicator(Communicator):
    """A single rank, without any others."""

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
        pulse: heartbeats of the ranks during work without collectives.
        group: of all ranks; `None`: the default one.
        revocation: of the group.
    """

    def __init__(
        self,
        device: torch.device,
        pulse: Pulse,
        group: dist.ProcessGroup | None = None,
        revocation: Revocation | None = None,
    ) -> None:
        self._pulse, self._group = pulse, group
        self.form_rows: Callable[[str], RowExchange] | None = None
        """Forms an exchange of small host tensors under a new name; all ranks call it."""
        self._rows: RowExchange | None = None
        self._formed_rows: list[RowExchange] = []
        """Those of this communicator's duplicates, which are left with it."""
        self.revocation = revocation or Revocation()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._native = dist.get_backend(group) != "gloo"
        self._own_device = device
        self.device = device if self._native else torch.device("cpu")
        self._aside = torch.cuda.Stream(device) if self.device.type == "cuda" else None

    def duplicate(self) -> Communicator:
        limit = timedelta(seconds=self._pulse.timeout_seconds)
        with remembered():
            group = dist.new_group(backend=dist.get_backend(), timeout=limit)
        return ProcessGroupCommunicator(self._own_device, self._pulse, group, self.revocation)

    def duplicate_for_rows(self) -> Communicator:
        if self.form_rows is None:
            return self.duplicate()
        try:
            rows = self.form_rows(f"rows{len(self._formed_rows)}")
        except SetupError as error:  # raised on all ranks
            log.warning("Small tensors travel by %s: %s", dist.get_backend(self._group), error)
            return self.duplicate()
        other = ProcessGroupCommunicator(self._own_device, self._pulse, self._group, self.revocation)
        other._rows = rows
        self._formed_rows.append(rows)
        return other

    def all_reduce_async(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        if self._aside is not None and tensor.device.type == "cpu" and tensor.nbytes <= MOST_ASIDE_BYTES:
            return self._reduce_aside(tensor, op, self._aside)
        staged = stage(tensor, self.device)
        try:
            with self._calling():
                work = dist.all_reduce(staged, op=_OPS[op], group=self._group, async_op=True)
        except RuntimeError as error:
            raise peer_lost(error) from error
        return _Reduction(work, staged, tensor.device, self.waiting)

    def _reduce_aside(self, tensor: torch.Tensor, op: ReduceOp, stream: torch.cuda.Stream) -> Pending:
        """Reduce a host tensor by a library that reads the device, without a wait for queued work.

        On the stream of the passes, both copies would wait for all work that is queued there, twice a step.
        """
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())
        with torch.cuda.stream(stream):
            staged = pinned.to(self.device, non_blocking=True)
            try:
                with self._calling():
                    work = dist.all_reduce(staged, op=_OPS[op], group=self._group, async_op=True)
                work.wait()  # the stream waits for it, not this process
            except RuntimeError as error:
                raise peer_lost(error) from error
            result = torch.empty_like(pinned, pin_memory=True).copy_(staged, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return _Aside(arrived, result, self.waiting)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        staged = stage(tensor, self.device)
        gathered = [torch.empty_like(staged) for _ in range(self.world_size)]
        try:
            with self._calling():
                work = dist.all_gather(gathered, staged, group=self._group, async_op=True)
            work.wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
        return [self._home(part, tensor.device) for part in gathered]

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        if self._rows is not None:
            host = tensor.to("cpu")
            self._rows.sum_(host)
            if host is not tensor:
                tensor.copy_(host)
            return None
        if tensor.device.type != self.device.type:
            return super().all_reduce_(tensor)
        try:
            with self._calling():
                work = dist.all_reduce(tensor, group=self._group, async_op=True)
            work.wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
        return None

    def all_gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        if self._rows is not None:
            return self._rows.gather_rows(row.to("cpu")).to(row.device)
        if row.device.type != self.device.type:
            return super().all_gather_rows(row)
        rows = row.new_empty(self.world_size, len(row))
        try:
            with self._calling():
                if self.device.type == "cpu":
                    work = dist.all_gather(list(rows), row, group=self._group, async_op=True)
                else:
                    work = _gather_into(rows.view(-1), row, group=self._group, async_op=True)
            work.wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
        return rows

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        staged = stage(tensor, self.device)
        try:
            with self._calling():
                work = dist.broadcast(staged, src=source, group=self._group, async_op=True)
            work.wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
        return self._home(staged, tensor.device)

    def _home(self, result: torch.Tensor, home: torch.device) -> torch.Tensor:
        with self.waiting():
            return result.to(home)

    def _calling(self) -> AbstractContextManager[None]:
        return self.revocation.calling() if self._native else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        return self.revocation.waiting() if self._native else nullcontext()

    def confirm(self) -> None:
        self.revocation.check()

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
        for rows in self._formed_rows:
            rows.abandon()
        self.close()

    def close(self) -> None:
        self._group = None
        for rows in self._formed_rows:
            rows.close()
        self._formed_rows.clear()
        if self.revocation.aborted:
            forget_aborted()
        elif dist.is_initialized():
            dist.destroy_process_group()


_Waiting = Callable[[], AbstractContextManager[None]]


class _Reduction:
    def __init__(self, work: dist.Work, staged: torch.Tensor, home: torch.device, waiting: _Waiting) -> None:
        self._work, self._staged, self._home, self._waiting = work, staged, home, waiting

    def wait(self) -> torch.Tensor:
        """Return the result, which may be wrong on a device: the guarded step and `confirm` find out."""
        try:
            with self._waiting():
                self._work.wait()
                return self._staged.to(self._home)
        except RuntimeError as error:
            raise peer_lost(error) from error


class _Aside:
    def __init__(self, arrived: torch.cuda.Event, result: torch.Tensor, waiting: _Waiting) -> None:
        self._arrived, self._result, self._waiting = arrived, result, waiting

    def wait(self) -> torch.Tensor:
        try:
            with self._waiting():
                self._arrived.synchronize()
        except RuntimeError as error:
            raise peer_lost(error) from error
        return self._result


def stage(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of `tensor` that a group on `device` can reduce.

    gloo supports CPU and CUDA tensors in place, but neither `xpu` nor `mps` tensors, nor float64 there: those
    go through the host.
    """
    home = device if device.type != "cpu" or tensor.device.type not in _HOST_TYPES else tensor.device
    return tensor.detach().to(home, copy=True).contiguous()


def peer_lost(error: RuntimeError) -> PeerLostError:
    """Return the error of a failed collective, with the first line of torch's error."""
    first_line = str(error).partition("\n")[0]
    return PeerLostError(f"a collective failed because another rank is gone or late ({first_line})")

"""Sums of large tensors, such as gradients or weights, over a group of ranks.

The `Communicator` is for small tensors and decisions; an `Exchange` is for bytes that take time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from hetexp.comm.communicator import peer_lost
from hetexp.comm.compression import CHUNK, Compressor
from hetexp.comm.connections.revocation import Revocation


class Exchange(ABC):
    """A group of ranks that sum tensors; all make the same calls in the same order, each from one thread.

    A call returns when the result is complete. On a device with streams it may return earlier: later work on
    the current stream then sees the result.
    """

    name: str
    """Transport, such as `gloo`, `nccl` or `shm`."""
    rank: int
    """This rank's place in the group."""
    size: int
    """Ranks in the group."""
    takes_host: bool = True
    """Whether it takes host tensors on any device's rank; otherwise it only takes the device's tensors."""

    @abstractmethod
    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor of floating-point numbers by its sum over the group.

        The result has the same bits on every rank.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """

    @abstractmethod
    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's bytes [uint8, length], in the group's order; all have one length.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """

    def sum_coded_(self, tensor: torch.Tensor, compressor: Compressor, feedback: torch.Tensor) -> None:
        """Replace a contiguous tensor by the sum over the group of each rank's compressed tensor.

        Compressed numbers cannot be added up (int8 would overflow, bfloat16 would round at every rank). So
        each rank sends its own to all, and all decode and add them in the group's order: every rank gets the
        same bits.

        Args:
            tensor: floating-point numbers of any shape.
            compressor: of the numbers.
            feedback: contiguous, of the shape of `tensor`. Its earlier error is added before compression, and
                it then holds the new error; 0 for values that are not finite, so that one bad step spoils no
                later one.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        for chunk, error in zip(tensor.view(-1).split(CHUNK), feedback.view(-1).split(CHUNK), strict=True):
            exact = chunk + error
            chunk.zero_()
            for rank, codes in enumerate(self.gather(compressor.encode(exact))):
                decoded = compressor.decode(codes, len(chunk), chunk.dtype)
                chunk += decoded
                if rank == self.rank:
                    torch.sub(exact, decoded, out=error).nan_to_num_(0.0, 0.0, 0.0)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor of any type by that of the group's first rank, bit for bit.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        source = self.gather(tensor.view(-1).view(torch.uint8))[0]
        if self.rank:
            tensor.view(-1).view(torch.uint8).copy_(source)

    def abandon(self) -> None:  # noqa: B027 - most have connections, which are shut
        """Let ranks that wait for this rank fail; only `close` may follow."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free the exchange's resources; safe to call twice, and no other call may follow."""


class GroupExchange(Exchange):
    """A process group of torch.distributed: gloo over TCP, or a vendor's own library.

    Args:
        group: `None`: the default one.
        revocation: of the group; `None`: its ranks never give it up.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, revocation: Revocation | None = None) -> None:
        self._group, self._revocation = group, revocation or Revocation()
        self.name = str(dist.get_backend(group))
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.takes_host = self.name == "gloo"

    def sum_(self, tensor: torch.Tensor) -> None:
        reduced = staged(tensor, self.name)
        try:
            with self._revocation.calling():
                work = dist.all_reduce(reduced, group=self._group, async_op=True)
            work.wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
        if reduced is not tensor:
            tensor.copy_(reduced)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        sent = tensor.to("cpu") if self.takes_host else tensor
        gathered = [torch.empty_like(sent) for _ in range(self.size)]
        try:
            with self._revocation.calling():
                work = dist.all_gather(gathered, sent, group=self._group, async_op=True)
            work.wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
        return [part.to(tensor.device) for part in gathered]


def staged(tensor: torch.Tensor, library: str) -> torch.Tensor:
    """Return a tensor that a library can reduce in place: gloo only supports `cpu` and `cuda` tensors."""
    return tensor if library != "gloo" or tensor.device.type in ("cpu", "cuda") else tensor.to("cpu")

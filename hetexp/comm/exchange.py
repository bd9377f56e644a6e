"""Sums of large tensors over a group of ranks: gradients, and weights where those travel.

What is small or decides something goes through the `Communicator`; an `Exchange` is for bytes that take time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from hetexp.comm.communicator import peer_lost
from hetexp.comm.compression import PIECE, Compressor


class Exchange(ABC):
    """A group of ranks that sum tensors; each call is made by all of them, in the same order, by one thread.

    A call returns when the result is there or, on a device with streams, when it will be for whatever the
    current stream is given next.
    """

    name: str
    """What carries the bytes, for people: `gloo`, `nccl`, `shm`."""
    rank: int
    """This rank's place in the group."""
    size: int
    """Ranks in the group."""
    takes_host: bool = True
    """Whether it takes tensors of the host, whatever the rank's device; else only those of the device."""

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

    def sum_coded_(self, tensor: torch.Tensor, codec: Compressor, feedback: torch.Tensor) -> None:
        """Replace a contiguous tensor by the sum over the group of what each rank's codes stand for.

        Codes cannot be added up (int8 would overflow, bfloat16 would round at every rank): each rank's own go
        to all, and all decode and add them in the group's order, so that every rank gets the same bits.

        Args:
            tensor: floating-point numbers of any shape.
            codec: how they are written.
            feedback: contiguous, as `tensor`: what the code has lost so far is added before coding, and what
                it loses now stands there afterwards; 0 where that is not finite, so that one bad step spoils
                no later one.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        pieces = zip(tensor.view(-1).split(PIECE), feedback.view(-1).split(PIECE), strict=True)
        for piece, lost in pieces:
            wanted = piece + lost
            piece.zero_()
            for rank, codes in enumerate(self.gather(codec.encode(wanted))):
                decoded = codec.decode(codes, len(piece), piece.dtype)
                piece += decoded
                if rank == self.rank:
                    torch.sub(wanted, decoded, out=lost).nan_to_num_(0.0, 0.0, 0.0)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor of any type by that of the group's first rank, bit for bit.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        taken = self.gather(tensor.view(-1).view(torch.uint8))[0]
        if self.rank:
            tensor.view(-1).view(torch.uint8).copy_(taken)

    def abandon(self) -> None:  # noqa: B027 - for most, their connections say so
        """Tell those that wait for this rank that it takes no further part; only `close` may follow."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give up what the exchange holds; safe to call twice, and no call may follow."""


class GroupExchange(Exchange):
    """A process group of torch.distributed: gloo over TCP, or a vendor's own library.

    Args:
        group: `None`: the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.name = str(dist.get_backend(group))
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._hosted = self.takes_host = self.name == "gloo"

    def sum_(self, tensor: torch.Tensor) -> None:
        staged = self._staged(tensor)
        try:
            dist.all_reduce(staged, group=self._group)
        except RuntimeError as error:
            raise peer_lost(error) from error
        if staged is not tensor:
            tensor.copy_(staged)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        staged = tensor.to("cpu") if self._hosted else tensor
        everyone = [torch.empty_like(staged) for _ in range(self.size)]
        try:
            dist.all_gather(everyone, staged, group=self._group)
        except RuntimeError as error:
            raise peer_lost(error) from error
        return [one.to(tensor.device) for one in everyone]

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        return staged(tensor, self.name)


def staged(tensor: torch.Tensor, library: str) -> torch.Tensor:
    """Return what a library can reduce in place: gloo reads and writes `cpu` and `cuda` tensors only."""
    return tensor if library != "gloo" or tensor.device.type in ("cpu", "cuda") else tensor.to("cpu")

"""Sums a large vector over all ranks, coded as the wire asks and at the pace of the links."""

from __future__ import annotations

import torch

from hetexp.comm.codec import PIECE, Wire, codec_of
from hetexp.comm.communicator import Communicator
from hetexp.comm.paced_exchange import PacedExchange
from hetexp.core.cost import Links


class Summation:
    """Gives every rank the same sum, to the bit, of one vector of each.

    Numbers as they are travel in an all-reduce. Codes cannot be added up (int8 would overflow, bfloat16
    would round at every rank): each rank's own go to all, and all decode and add them in rank order. What the
    code lost of this rank's vector is added to its next one.

    Args:
        links: channels of emulated devices, and what paces the exchange to them.
    """

    def __init__(
        self,
        communicator: Communicator,
        wire: Wire = "float32",
        paced: PacedExchange | None = None,
        links: Links | None = None,
    ) -> None:
        self._communicator, self._paced, self._links = communicator, paced, links
        self._codec = codec_of(wire)
        self.sent_bytes = 0
        """That this rank has handed over so far."""
        self.feedback: torch.Tensor | None = None
        """What the code has lost, to be sent the next time."""

    def num_bytes(self, length: int, element_size: int) -> int:
        """Return the bytes that a rank hands over for a vector of so many numbers."""
        if self._communicator.world_size == 1:
            return 0
        if self._codec is None:
            return length * element_size
        return sum(self._codec.num_bytes(min(PIECE, length - start)) for start in range(0, length, PIECE))

    def seconds(self, links: Links, num_bytes: int) -> float:
        """Return the modelled time of the exchange alone, of so many bytes of each rank."""
        gathers = self._codec is not None
        return links.gather_seconds(num_bytes) if gathers else links.exchange_seconds(num_bytes)

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of their vectors [length], on the host; all have one length.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        coded = self.num_bytes(len(vector), vector.element_size())
        self.sent_bytes += coded
        if self._paced is None or self._links is None:
            return self._exchange(vector)
        # The vector leaves the device as it is, and is coded on the host.
        on_device = len(vector) * vector.element_size()
        return self._paced.travel(on_device, self.seconds(self._links, coded), lambda: self._exchange(vector))

    def _exchange(self, vector: torch.Tensor) -> torch.Tensor:
        if self._communicator.world_size == 1:
            return vector.clone()
        pieces = vector.split(PIECE)
        if self._codec is None:
            return torch.cat([self._communicator.all_reduce(piece) for piece in pieces])
        if self.feedback is None:
            self.feedback = torch.zeros_like(vector)
        sums = [self._gather(*pair) for pair in zip(pieces, self.feedback.split(PIECE), strict=True)]
        return torch.cat(sums)

    def _gather(self, piece: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' pieces, and put what is lost of this rank's into `feedback`."""
        assert self._codec is not None
        wanted = piece + feedback
        everyone = self._communicator.all_gather(self._codec.encode(wanted))
        decoded = [self._codec.decode(one, len(piece), piece.dtype) for one in everyone]
        torch.sub(wanted, decoded[self._communicator.rank], out=feedback)
        total = torch.zeros_like(piece)
        for one in decoded:
            total += one
        return total

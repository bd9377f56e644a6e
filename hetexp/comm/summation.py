"""Sums a large vector over all ranks, coded as the wire asks and at the pace of the links."""

from __future__ import annotations

import torch

from hetexp.comm.compression import PIECE, compressor_of
from hetexp.comm.exchange import Exchange
from hetexp.comm.paced_exchange import PacedExchange
from hetexp.core.cost.step import Links, Wire

HOST = torch.device("cpu")


class Summation:
    """Gives every rank the same sum, to the bit, of one vector of each on the host.

    The exchange sums numbers as they are. Where the wire codes them, all decode each rank's codes and add
    them up in one order; what the code lost of this rank's vector is added to its next one.

    Args:
        exchange: of all ranks; `None` for a rank that is alone.
        links: channels of emulated devices, and what paces the exchange to them.
        device: the rank's own, for an exchange that takes nothing else.
    """

    def __init__(
        self,
        exchange: Exchange | None,
        wire: Wire = "float32",
        paced: PacedExchange | None = None,
        links: Links | None = None,
        device: torch.device = HOST,
    ) -> None:
        self._exchange, self._paced, self._links = exchange, paced, links
        self._codec = compressor_of(wire)
        self._device = HOST if exchange is None or exchange.takes_host else device
        self.sent_bytes = 0
        """That this rank has handed over so far."""
        self.feedback: torch.Tensor | None = None
        """What the code has lost, to be sent the next time."""

    def plain(self) -> Summation:
        """Return a summation over the same ranks that codes nothing, at no link's pace."""
        return Summation(self._exchange, device=self._device)

    def num_bytes(self, length: int, element_size: int) -> int:
        """Return the bytes that a rank hands over for a vector of so many numbers."""
        if self._exchange is None:
            return 0
        if self._codec is None:
            return length * element_size
        return self._codec.sent_bytes(length)

    def seconds(self, links: Links, length: int, element_size: int) -> float:
        """Return the modelled time of the exchange alone, of so many numbers of each rank."""
        if self._codec is None:
            return links.exchange_seconds(length * element_size)
        return links.coded_seconds(length * element_size, self._codec.sent_bytes(length))

    def sum_(self, vector: torch.Tensor) -> torch.Tensor:
        """Replace a vector [length] by the sum over all ranks, and return it; all have one length.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        length, size = len(vector), vector.element_size()
        self.sent_bytes += self.num_bytes(length, size)
        if self._paced is None or self._links is None:
            self._sum_(vector)
        else:
            # The vector leaves the device as it is, and is coded on the host.
            seconds = self.seconds(self._links, length, size)
            self._paced.travel(length * size, seconds, lambda: self._sum_(vector))
        return vector

    def _sum_(self, vector: torch.Tensor) -> None:
        if self._exchange is None:
            return
        if self._codec is not None and self.feedback is None:
            self.feedback = torch.zeros_like(vector)
        if self._device.type == "cpu":
            self._sum_piece_(self._exchange, vector, self.feedback)
            return
        lost = self.feedback.split(PIECE) if self.feedback is not None else [None] * -(-len(vector) // PIECE)
        for piece, own in zip(vector.split(PIECE), lost, strict=True):
            there = piece.to(self._device)
            kept = own.to(self._device) if own is not None else None
            self._sum_piece_(self._exchange, there, kept)
            piece.copy_(there)
            if own is not None and kept is not None:
                own.copy_(kept)

    def _sum_piece_(self, exchange: Exchange, piece: torch.Tensor, feedback: torch.Tensor | None) -> None:
        if self._codec is None or feedback is None:
            exchange.sum_(piece)
        else:
            exchange.sum_coded_(piece, self._codec, feedback)

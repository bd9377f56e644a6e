"""Sums a large vector over all ranks, with the wire's compression and at the pace of emulated links."""

from __future__ import annotations

import torch

from hetexp.comm.compression import CHUNK, compressor_of
from hetexp.comm.exchange import Exchange
from hetexp.comm.hook import CommHook
from hetexp.core.cost.step import Links, Wire

HOST = torch.device("cpu")


class Summation:
    """Sums host vectors of all ranks; every rank gets the same bits.

    With compression, all ranks decode each rank's vector and add them up in one order; the error of this
    rank's vector is added to its next one.

    Args:
        exchange: of all ranks; `None` for a single rank.
        hook: paces the exchange of emulated devices.
        device: the rank's own, for an exchange that only takes the device's tensors.
    """

    def __init__(
        self,
        exchange: Exchange | None,
        wire: Wire = "float32",
        hook: CommHook | None = None,
        device: torch.device = HOST,
    ) -> None:
        self._exchange, self._hook = exchange, hook or CommHook()
        self._compressor = compressor_of(wire)
        self._device = HOST if exchange is None or exchange.takes_host else device
        self.sent_bytes = 0
        """Bytes that this rank has sent so far."""
        self.feedback: torch.Tensor | None = None
        """The error of compression, added to the next vector."""

    def plain(self) -> Summation:
        """Return a summation over the same ranks without compression and pacing."""
        return Summation(self._exchange, device=self._device)

    def num_bytes(self, length: int, element_size: int) -> int:
        """Return the bytes that a rank sends for a vector of `length` numbers."""
        if self._exchange is None:
            return 0
        if self._compressor is None:
            return length * element_size
        return self._compressor.sent_bytes(length)

    def seconds(self, links: Links, length: int, element_size: int) -> float:
        """Return the modelled time of the exchange alone, of `length` numbers of each rank."""
        if self._compressor is None:
            return links.exchange_seconds(length * element_size)
        return links.coded_seconds(length * element_size, self._compressor.sent_bytes(length))

    def sum_(self, vector: torch.Tensor) -> torch.Tensor:
        """Replace a vector [length] by the sum over all ranks, and return it; all have one length.

        Raises:
            PeerLostError: another rank is gone or did not come in time.
        """
        length, size = len(vector), vector.element_size()
        self.sent_bytes += self.num_bytes(length, size)
        # The vector leaves the device uncompressed, and is compressed on the host.
        self._hook.travel(
            length * size, lambda links: self.seconds(links, length, size), lambda: self._sum_(vector)
        )
        return vector

    def _sum_(self, vector: torch.Tensor) -> None:
        if self._exchange is None:
            return
        if self._compressor is not None and self.feedback is None:
            self.feedback = torch.zeros_like(vector)
        if self._device.type == "cpu":
            self._sum_chunk_(self._exchange, vector, self.feedback)
            return
        chunks = vector.split(CHUNK)
        errors = self.feedback.split(CHUNK) if self.feedback is not None else [None] * len(chunks)
        for chunk, error in zip(chunks, errors, strict=True):
            on_device = chunk.to(self._device)
            device_error = error.to(self._device) if error is not None else None
            self._sum_chunk_(self._exchange, on_device, device_error)
            chunk.copy_(on_device)
            if error is not None and device_error is not None:
                error.copy_(device_error)

    def _sum_chunk_(self, exchange: Exchange, chunk: torch.Tensor, feedback: torch.Tensor | None) -> None:
        if self._compressor is None or feedback is None:
            exchange.sum_(chunk)
        else:
            exchange.sum_coded_(chunk, self._compressor, feedback)

"""Interfaces behind a communicator: a collective under way, and an exchange of small rows on one host."""

from __future__ import annotations

from typing import Protocol

import torch


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> torch.Tensor:
        """Return the result, on the device of the original tensor."""
        ...


class RowExchange(Protocol):
    """Exchanges small tensors of the host between ranks that are all on it."""

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return every rank's row [length] as one tensor [ranks, length]."""
        ...

    def abandon(self) -> None:
        """Let ranks that wait for this rank fail."""

    def close(self) -> None:
        """Free the memory."""

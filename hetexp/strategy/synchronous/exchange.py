"""The collectives for a strategy with an exchange of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class GradientExchange(Protocol):
    """Collectives of all ranks during the exchange of one step's gradients.

    Their time and bytes are measured, and delayed on emulated devices.
    """

    rank: int
    world_size: int
    local_count: float
    """Samples or unmasked tokens of this rank's gradient."""
    global_count: float
    """Samples or unmasked tokens of all ranks."""

    def sum_(self, vector: torch.Tensor) -> torch.Tensor:
        """Replace a vector by its sum over all ranks, the same bits on each of them, and return it.

        Every rank calls it, with vectors of one length and type.

        Raises:
            PeerLostError: another rank is gone.
        """
        ...


class ExchangesGradients(Protocol):
    """What the engine needs of a `hetexp.Synchronous` strategy; see there."""

    def exchange(self, gradient: torch.Tensor, ranks: GradientExchange) -> torch.Tensor: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None: ...

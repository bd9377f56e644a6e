"""The options of local SGD, as its engine reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from hetexp.core.cost.step import Wire


class LocalSettings(Protocol):
    """The options of `LocalSGD` and strategies like it; see there for each."""

    sync_every: int
    local_steps: Literal["equal", "speed"]
    local_batch_size: int | None
    outer_lr: float
    outer_momentum: float
    outer_nesterov: bool
    inner_state: Literal["keep", "average", "reset"]
    wire: Wire

    def rounds(self, world_size: int) -> Sequence[Sequence[Sequence[int]]]:
        """Return the groups of ranks that average their weights between syncs; see `LocalSGD.rounds`."""
        ...

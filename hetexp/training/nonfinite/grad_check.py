"""Checks on the device whether the exchanged gradient is finite; the host reads the result after the update.

If the host read it before, the device would idle until the host has queued the update and the next passes.
An optimizer that can skip an update on the device (torch's fused ones, for `torch.amp.GradScaler`) is queued
first: the device decides, and the host reads the decision while the device is busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hetexp.core.errors import PeerLostError
from hetexp.optimizer.build import FUSES
from hetexp.training.nonfinite.loss_scale import largest_magnitude
from hetexp.training.state import TrainState

_REVOKED = -math.inf
"""In place of the largest magnitude: the group was given up before the gradients were complete."""


class GradCheck:
    """Checks a step's exchanged gradients; the result is the same on every rank.

    Args:
        enabled: whether to check at all; unchecked gradients count as finite.
    """

    def __init__(self, state: TrainState, gradients: Sequence[torch.Tensor], enabled: bool) -> None:
        largest = largest_magnitude(gradients) if enabled else None
        self.bad: torch.Tensor | None = None
        """Whether a gradient is not finite or incomplete, on the device; `None` if unchecked."""
        self._read: Callable[[], float] | None = None
        self._revocation = state.communicator.revocation
        revoked = self._revocation.snapshot(state.device) if self._revocation.native else None
        if revoked is not None:
            largest = torch.zeros((), device=state.device) if largest is None else largest
            largest = torch.where(revoked, _REVOKED, largest)
        if largest is not None:
            self.bad = ~torch.isfinite(largest)
            self._read = state.backend.read_later(largest)

    def finite(self) -> bool:
        """Return whether all gradients are finite; waits for the device's check.

        Raises:
            PeerLostError: a rank was lost, and the gradients are incomplete.
        """
        if self._read is None:
            return True
        # In this frame only if the group may be revoked: `hang_detection` takes it for a wait for others.
        native = self._revocation.native
        largest = self._revocation.wait_for(self._read) if native else self._read()
        if largest == _REVOKED:
            raise PeerLostError("the members of this training have changed in the midst of a step")
        return math.isfinite(largest)


def may_be_skipped(state: TrainState) -> bool:
    """Return whether the device can skip an update that is queued already.

    torch's fused SGD cannot: a skipped first update would leave its momentum uninitialised. Emulated devices
    cannot: their updates take their time in any case.
    """
    optimizer = state.optimizer
    skips = type(optimizer) in FUSES and all(group["fused"] for group in optimizer.param_groups)
    return skips and not state.plan.paced


@contextmanager
def skip_if_nonfinite(optimizer: torch.optim.Optimizer, bad: torch.Tensor | None) -> Iterator[None]:
    """Let the update in the block change nothing if `bad` turns out to be true on the device."""
    if bad is None:
        yield
        return
    attributes: dict[str, torch.Tensor | None] = {"grad_scale": None, "found_inf": bad.float()}
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(optimizer, name)

"""Whether the exchanged gradient is finite: found out on the device, and read once the update is queued.

A host that reads it before would queue the update, and the next step's passes, on a device with nothing to
do. Where the optimizer leaves an update out by itself (torch's fused ones, for `torch.amp.GradScaler`), it is
queued first; the device decides, and the host learns of it while the device is busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hetexp.optimizer.build import FUSES
from hetexp.training.nonfinite.loss_scale import LossScale, largest_magnitude
from hetexp.training.state import TrainState


class GradCheck:
    """On the gradients of a step, the loss scale taken out of them; the same on every rank.

    Args:
        look: whether to look at all; unchecked gradients count as finite.
    """

    def __init__(
        self, state: TrainState, gradients: Sequence[torch.Tensor], loss_scale: LossScale | None, look: bool
    ) -> None:
        if loss_scale is not None:
            loss_scale.unscale(gradients)
        largest = largest_magnitude(gradients) if look or loss_scale is not None else None
        self.bad: torch.Tensor | None = None
        """On the device, whether one is not finite."""
        self._read: Callable[[], float] | None = None
        if largest is not None:
            self.bad = ~torch.isfinite(largest)
            self._read = state.backend.read_later(largest)

    def finite(self) -> bool:
        """Return whether all are finite; waits for the device to have come so far."""
        return self._read is None or math.isfinite(self._read())


def may_be_skipped(state: TrainState) -> bool:
    """Return whether the device can leave out an update that is queued already.

    Not torch's fused SGD: an update that is left out would begin its momentum with whatever memory held. Not
    on emulated devices, whose updates take their time whatever becomes of them.
    """
    optimizer = state.optimizer
    own = type(optimizer) in FUSES and all(group["fused"] for group in optimizer.param_groups)
    return own and not state.plan.paced


@contextmanager
def skip_if_nonfinite(optimizer: torch.optim.Optimizer, bad: torch.Tensor | None) -> Iterator[None]:
    """Let the update in the block change nothing where `bad` turns out to be true."""
    if bad is None:
        yield
        return
    given: dict[str, torch.Tensor | None] = {"grad_scale": None, "found_inf": bad.float()}
    for name, value in given.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in given:
            delattr(optimizer, name)

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

from hetexp.optimizer.build import FUSES
from hetexp.training.nonfinite.loss_scale import largest_magnitude
from hetexp.training.state import TrainState


class GradCheck:
    """Checks a step's exchanged gradients; the result is the same on every rank.

    Args:
        enabled: whether to check at all; unchecked gradients count as finite.
    """

    def __init__(self, state: TrainState, gradients: Sequence[torch.Tensor], enabled: bool) -> None:
        largest = largest_magnitude(gradients) if enabled else None
        self.bad: torch.Tensor | None = None
        """Whether a gradient is not finite, on the device; `None` if unchecked."""
        self._read: Callable[[], float] | None = None
        if largest is not None:
            self.bad = ~torch.isfinite(largest)
            self._read = state.backend.read_later(largest)

    def finite(self) -> bool:
        """Return whether all gradients are finite; waits for the device's check."""
        return self._read is None or math.isfinite(self._read())


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

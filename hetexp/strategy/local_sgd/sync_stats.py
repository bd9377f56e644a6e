"""What a rank counts between two syncs, and how its message about a step that is not finite reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from hetexp.training.nonfinite.samples import ALONE, TOGETHER, NonFiniteSamples

FIX = "Lower `optimizer.lr` or set `trainer.clip_norm`; trainer.non_finite=skip leaves such steps out."


@dataclass
class SyncStats:
    """What a rank did since the last sync."""

    count: float = 0
    """Samples or unmasked tokens that it trained on."""
    left_out: int = 0
    """Local steps whose gradient was not finite."""
    hopeless_step: int = 0
    """Number of the first step, from 1, of which no smaller loss scale would have helped; 0: none."""
    hopeless_loss: float = 0.0
    found: NonFiniteSamples = field(default_factory=NonFiniteSamples)
    """Which samples made that step so."""
    samples: int = 0
    """In local steps that were not left out."""
    tally: torch.Tensor | None = None
    """What the model has counted of them."""
    seconds: list[tuple[int, int, float]] = field(default_factory=list)
    """Step, samples of its global batch and own seconds, if shares follow the devices' speeds."""

    def counted(self, tally: torch.Tensor | None, num_samples: int) -> None:
        """Add what the model has counted in a local step."""
        self.samples += num_samples
        if tally is not None:
            self.tally = tally if self.tally is None else self.tally + tally


def explain(step: int, loss: float, rank: int, device: str, found: NonFiniteSamples) -> str:
    """Return the message about a local step whose gradient is not finite.

    Args:
        step: its number, counted from 1.
        found: the samples that made it so.
    """
    which = f"the loss is {loss} there" if not math.isfinite(loss) else "the loss is finite"
    why = {ALONE: f", because of {found.words()}", TOGETHER: f", in a pass over {found.words()}"}
    because = why.get(found.what, "")
    return f"The gradient of step {step} on rank {rank}, {device}, is not finite, and {which}{because}."

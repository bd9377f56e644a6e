"""A rank's statistics between two syncs, and its message about a step that is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from hetexp.training.nonfinite.samples import ALONE, TOGETHER, NonFiniteSamples

FIX = "Lower `optimizer.lr` or set `trainer.clip_norm`; trainer.non_finite=skip leaves such steps out."


@dataclass
class SyncStats:
    """Counts of one rank since the last sync."""

    count: float = 0
    """Samples or unmasked tokens that the rank trained on."""
    skipped: int = 0
    """Local steps whose gradient was not finite."""
    unrecoverable_step: int = 0
    """Number, from 1, of the first step that no smaller loss scale would have helped; 0: none."""
    unrecoverable_loss: float = 0.0
    samples_found: NonFiniteSamples = field(default_factory=NonFiniteSamples)
    """Samples that made that step non-finite."""
    samples: int = 0
    """Samples in local steps that were not skipped."""
    tally: torch.Tensor | None = None
    """The model's own counts of these samples."""
    seconds: list[tuple[int, int, float]] = field(default_factory=list)
    """Step, samples of its global batch and own seconds, if shares follow the devices' speeds."""

    def counted(self, tally: torch.Tensor | None, num_samples: int) -> None:
        """Add the model's own counts in a local step."""
        self.samples += num_samples
        if tally is not None:
            self.tally = tally if self.tally is None else self.tally + tally


def explain(step: int, loss: float, rank: int, device: str, report: NonFiniteSamples) -> str:
    """Return the message about a local step whose gradient is not finite.

    Args:
        step: its number, counted from 1.
        report: the samples that made it so.
    """
    which = f"the loss is {loss} there" if not math.isfinite(loss) else "the loss is finite"
    why = {ALONE: f", because of {report.words()}", TOGETHER: f", in a pass over {report.words()}"}
    because = why.get(report.what, "")
    return f"The gradient of step {step} on rank {rank}, {device}, is not finite, and {which}{because}."

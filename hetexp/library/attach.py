"""What happens at the first call of a script's model in training: only then its work is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hetexp.core.errors import SetupError
from hetexp.hardware.emulation.pacing import num_samples, tensors
from hetexp.library.front import Call, Called, keeping_modes
from hetexp.training.measuring.warmup_calibration import REHEARSED_STEPS, rehearse
from hetexp.training.state import TrainState


def attach(parts: TrainState, called: Called, call: Call) -> None:
    """Prepare the device for the model, and what the ranks do together within it; all of them call it.

    Args:
        called: what the strategy has wrapped.
        call: the first one in training, on this rank.
    """
    num_bytes = sum(t.numel() * t.element_size() for t in tensors(call))
    parts.input_bytes = num_bytes // max(1, num_samples(call))
    parts.backend.attach(called, parts.optimizer, call)
    parts.strategy.attach_group(parts.module, parts.communicator, call, parts.backend.waiting)


def find_pace(parts: TrainState, call: Call, has_samples: bool) -> None:
    """Rehearse a few steps where devices are emulated, and begin to pace them; all ranks call it.

    Args:
        has_samples: whether this rank has any of its own in the step.
    """
    with keeping_modes(parts.model):
        steps: Callable[[TrainState], None] = partial(_real_steps, call if has_samples else None)
        parts.time_scale = rehearse(parts, steps)


def _real_steps(call: Call | None, parts: TrainState) -> None:
    """Do a few steps with whatever loss: only their time counts, and all is undone."""
    for _ in range(REHEARSED_STEPS):
        parts.optimizer.zero_grad(set_to_none=True)
        if parts.paced is not None:
            parts.paced.begin_step()
        parts.backend.begin_step(-1)
        with parts.autocast():
            output = parts.module(call)
        found = [t.float().sum() for t in tensors(output) if t.requires_grad]
        if not found:
            raise SetupError(
                "A model on emulated devices must return tensors, or tuples, lists and dicts of them, by "
                f"which its work can be followed, but returns a {type(output).__name__}."
            )
        torch.stack(found).sum().backward()
        parts.backend.begin_update()
        parts.optimizer.step()

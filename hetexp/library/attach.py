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


def attach(state: TrainState, called: Called, call: Call) -> None:
    """Prepare the device for the model, and what the ranks do together within it; all of them call it.

    Args:
        called: what the strategy has wrapped.
        call: the first one in training, on this rank.
    """
    num_bytes = sum(t.numel() * t.element_size() for t in tensors(call))
    state.input_bytes = num_bytes // max(1, num_samples(call))
    state.backend.attach(called, state.optimizer, call)
    state.strategy.attach_group(state.module, state.communicator, call, state.backend.waiting)


def find_pace(state: TrainState, call: Call, has_samples: bool) -> None:
    """Rehearse a few steps where devices are emulated, and begin to pace them; all ranks call it.

    Args:
        has_samples: whether this rank has any of its own in the step.
    """
    with keeping_modes(state.model):
        steps: Callable[[TrainState], None] = partial(_real_steps, call if has_samples else None)
        state.time_scale = rehearse(state, steps)


def _real_steps(call: Call | None, state: TrainState) -> None:
    """Do a few steps with whatever loss: only their time counts, and all is undone."""
    for _ in range(REHEARSED_STEPS):
        state.optimizer.zero_grad(set_to_none=True)
        if state.paced is not None:
            state.paced.begin_step()
        state.backend.begin_step(-1)
        with state.autocast():
            output = state.module(call)
        found = [t.float().sum() for t in tensors(output) if t.requires_grad]
        if not found:
            raise SetupError(
                "A model on emulated devices must return tensors, or tuples, lists and dicts of them, by "
                f"which its work can be followed, but returns a {type(output).__name__}."
            )
        torch.stack(found).sum().backward()
        state.backend.begin_update()
        state.optimizer.step()

"""Attaches device and strategy at the first call of a script's model in training, which shows its inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hetexp.core.errors import SetupError
from hetexp.hardware.emulation.pacing import num_samples, tensors
from hetexp.library.front import Call, Called, keeping_modes
from hetexp.training.measuring.warmup_calibration import calibrate_time_scale
from hetexp.training.state import TrainState


def attach(state: TrainState, called: Called, call: Call) -> None:
    """Attach the model to the device, and the strategy to the group; all ranks call it.

    Args:
        called: the module that the strategy has wrapped.
        call: this rank's first call in training.
    """
    num_bytes = sum(t.numel() * t.element_size() for t in tensors(call))
    state.input_bytes = num_bytes // max(1, num_samples(call))
    state.backend.attach(called, state.optimizer, call)
    with state.autocast():  # else a trial pass of these samples would take twice a step's memory
        state.strategy.attach_group(state.module, state.communicator, call, state.backend.waiting)


def find_time_scale(state: TrainState, call: Call, has_samples: bool) -> None:
    """Find the time scale of emulated devices by a few steps, and start pacing; all ranks call it.

    Args:
        has_samples: whether this rank has samples in the step.
    """
    with keeping_modes(state.model):
        steps: Callable[[TrainState, int], None] = partial(_real_steps, call if has_samples else None)
        state.time_scale = calibrate_time_scale(state, steps)


def _real_steps(call: Call | None, state: TrainState, steps: int) -> None:
    """Run so many steps with an arbitrary loss: only their time counts, and they are undone."""
    for _ in range(steps):
        state.optimizer.zero_grad(set_to_none=True)
        state.hook.begin_step()
        state.backend.begin_step(-1)
        with state.autocast():
            output = state.module(call)
        sums = [t.float().sum() for t in tensors(output) if t.requires_grad]
        if not sums:
            raise SetupError(
                "A model on emulated devices must return tensors, or tuples, lists and dicts of them, by "
                f"which its work can be followed, but returns a {type(output).__name__}."
            )
        torch.stack(sums).sum().backward()
        state.backend.begin_update()
        state.optimizer.step()

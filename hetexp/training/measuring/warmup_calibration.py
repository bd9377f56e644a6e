"""Finds the time scale of an emulated training: how slow it must be so that this machine keeps every pace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetexp.comm.step_message import StepMessage
from hetexp.hardware.emulation.emulated import SCALE_MARGIN
from hetexp.optimizer.build import follow_schedule
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.seeding import keeping_random_states
from hetexp.training.state import Progress, TrainState

WARMUP_STEPS = 6


def calibrate_time_scale(
    state: TrainState, real_steps: Callable[[TrainState], None] | None = None
) -> float | None:
    """Find the time scale of emulated devices and start their pacing; return `None` without such devices.

    All ranks run a few real steps at the same time, as they will in training, and take the smallest scale
    that none of them outruns. Parameters, optimizer, schedule and random states are restored.

    Args:
        real_steps: runs these steps at full speed; by default those of the configured training.
    """
    if not state.plan.paced:
        return None
    scale = state.config.hardware.time_scale
    if scale is None:
        with restored_after(state):
            (real_steps or _real_steps)(state)
        compute = state.backend.rehearsal_scale() or 0.0
        ratios = [link.real_ratio() for link in state.engine.paced_links]
        links = max(ratios, default=0.0) * SCALE_MARGIN
        needed = torch.tensor([max(compute, links)], dtype=torch.float64)
        scale = float(state.communicator.all_reduce(needed, "max"))
    state.communicator.barrier()
    state.backend.start_pacing(scale)
    state.engine.start_pacing(scale)
    return scale


@contextmanager
def restored_after(state: TrainState) -> Iterator[None]:
    """Let the block train, and restore weights, optimizer, schedule and random states afterwards."""
    weights = copy.deepcopy(state.model.state_dict())
    optimizer = copy.deepcopy(state.optimizer.state_dict())
    cards = state.backend.random_states()
    state.model.train()
    with keeping_random_states():
        yield
    state.backend.set_random_states(cards)
    state.backend.resume()
    state.optimizer.zero_grad(set_to_none=True)
    state.model.load_state_dict(weights)
    state.optimizer.state.clear()
    state.optimizer.load_state_dict(optimizer)
    follow_schedule(state.schedule, 0, 0, None)
    state.engine.forget()


def _real_steps(state: TrainState) -> None:
    """Train a few steps at full speed."""
    divisor = state.strategy.gradient_divisor(state.communicator.world_size)
    scale = copy.copy(state.loss_scale)  # the training starts with its own
    normalizer = LossNormalizer(StepMessage(state.communicator), divisor, loss_scale=scale)
    meter = StepTimer(state.backend)
    for batch in state.engine.batches(Progress().position, WARMUP_STEPS):
        state.engine.step(-1, batch, normalizer, meter)
    state.engine.rehearse_exchange()

"""Before an emulated training: how slow must it be so that this machine can keep every pace?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetexp.comm.step_message import StepMessage
from hetexp.hardware.emulation.emulated import SCALE_MARGIN
from hetexp.optimizer.build import restart_schedule
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.seeding import undrawn
from hetexp.training.state import Progress, TrainState

REHEARSED_STEPS = 6


def rehearse(state: TrainState, real_steps: Callable[[TrainState], None] | None = None) -> float | None:
    """Find the time scale of emulated devices and start their pacing; `None` without any.

    All ranks do a few real steps at the same time, as they will in training, and take the smallest scale that
    none of them outruns. Parameters, optimizer, schedule and random states are left as they were.

    Args:
        real_steps: does these steps at full speed; by default those of the configured training.
    """
    if not state.plan.paced:
        return None
    scale = state.config.hardware.time_scale
    if scale is None:
        with undone(state):
            (real_steps or _real_steps)(state)
        own = state.backend.rehearsal_scale() or 0.0
        ratios = [link.real_ratio() for link in state.engine.paced_links]
        links = max(ratios, default=0.0) * SCALE_MARGIN
        needed = torch.tensor([max(own, links)], dtype=torch.float64)
        scale = float(state.communicator.all_reduce(needed, "max"))
    state.communicator.barrier()
    state.backend.start_pacing(scale)
    state.engine.start_pacing(scale)
    return scale


@contextmanager
def undone(state: TrainState) -> Iterator[None]:
    """Let the block train, and put weights, optimizer, schedule and random states back afterwards."""
    weights = copy.deepcopy(state.model.state_dict())
    optimizer = copy.deepcopy(state.optimizer.state_dict())
    cards = state.backend.random_states()
    state.model.train()
    with undrawn():
        yield
    state.backend.set_random_states(cards)
    state.backend.resume()
    state.optimizer.zero_grad(set_to_none=True)
    state.model.load_state_dict(weights)
    state.optimizer.state.clear()
    state.optimizer.load_state_dict(optimizer)
    restart_schedule(state.schedule, 0)
    state.engine.forget()


def _real_steps(state: TrainState) -> None:
    """Train a little at full speed."""
    divisor = state.strategy.gradient_divisor(state.communicator.world_size)
    scale = copy.copy(state.loss_scale)  # whatever the rehearsal finds out, the training starts fresh
    normalizer = LossNormalizer(StepMessage(state.communicator), divisor, loss_scale=scale)
    meter = StepTimer(state.backend)
    for batch in state.engine.batches(Progress().position, REHEARSED_STEPS):
        state.engine.step(-1, batch, normalizer, meter)
    state.engine.rehearse_exchange()

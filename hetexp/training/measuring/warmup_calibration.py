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


def rehearse(parts: TrainState, real_steps: Callable[[TrainState], None] | None = None) -> float | None:
    """Find the time scale of emulated devices and start their pacing; `None` without any.

    All ranks do a few real steps at the same time, as they will in training, and take the smallest scale that
    none of them outruns. Parameters, optimizer, schedule and random states are left as they were.

    Args:
        real_steps: does these steps at full speed; by default those of the configured training.
    """
    if not parts.plan.paced:
        return None
    scale = parts.config.hardware.time_scale
    if scale is None:
        with undone(parts):
            (real_steps or _real_steps)(parts)
        own = parts.backend.rehearsal_scale() or 0.0
        ratios = [link.real_ratio() for link in parts.engine.paced_links]
        links = max(ratios, default=0.0) * SCALE_MARGIN
        needed = torch.tensor([max(own, links)], dtype=torch.float64)
        scale = float(parts.communicator.all_reduce(needed, "max"))
    parts.communicator.barrier()
    parts.backend.start_pacing(scale)
    parts.engine.start_pacing(scale)
    return scale


@contextmanager
def undone(parts: TrainState) -> Iterator[None]:
    """Let the block train, and put weights, optimizer, schedule and random states back afterwards."""
    weights = copy.deepcopy(parts.model.state_dict())
    optimizer = copy.deepcopy(parts.optimizer.state_dict())
    cards = parts.backend.random_states()
    parts.model.train()
    with undrawn():
        yield
    parts.backend.set_random_states(cards)
    parts.backend.resume()
    parts.optimizer.zero_grad(set_to_none=True)
    parts.model.load_state_dict(weights)
    parts.optimizer.state.clear()
    parts.optimizer.load_state_dict(optimizer)
    restart_schedule(parts.schedule, 0)
    parts.engine.forget()


def _real_steps(parts: TrainState) -> None:
    """Train a little at full speed."""
    divisor = parts.strategy.gradient_divisor(parts.communicator.world_size)
    scale = copy.copy(parts.loss_scale)  # whatever the rehearsal finds out, the training starts fresh
    normalizer = LossNormalizer(StepMessage(parts.communicator), divisor, loss_scale=scale)
    meter = StepTimer(parts.backend)
    for batch in parts.engine.batches(Progress().position, REHEARSED_STEPS):
        parts.engine.step(-1, batch, normalizer, meter)
    parts.engine.rehearse_exchange()

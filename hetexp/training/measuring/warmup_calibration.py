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

WARMUP_STEPS, PACED_STEPS = 4, 4
"""Steps at full speed, and then at the pace that these allow."""
FAR_BELOW = 0.85
"""A needed pace ÷ the rehearsed one below which a training gets quicker."""
COLD_STEPS = 2
"""Steps of a new process that are slower than later ones, where an earlier process or run found a pace."""


def calibrate_time_scale(
    state: TrainState, real_steps: Callable[[TrainState, int], None] | None = None
) -> float | None:
    """Find the time scale of emulated devices and start their pacing; return `None` without such devices.

    All ranks run a few real steps at full speed, then at a pace that these allow, because a machine whose
    cores rest now and then computes at another speed. They take the smallest scale that none of them outruns.
    Parameters, optimizer, schedule and random states are restored.

    Args:
        real_steps: runs so many steps; by default those of the configured training.
    """
    if not state.plan.paced:
        return None
    scale: float | None = state.config.hardware.time_scale
    run, known = real_steps or _real_steps, state.plan.calibration or {}
    if scale is None and known.get("time_scale") is not None:
        scale = known["time_scale"]
        with restored_after(state):
            run(state, COLD_STEPS)
    elif scale is None:
        earlier = known.get("earlier_time_scale")
        with restored_after(state):
            run(state, WARMUP_STEPS if earlier is None else COLD_STEPS)
            links = max((link.real_ratio() for link in state.engine.paced_links), default=0.0)
            _start_pacing(state, _slowest(state, links * SCALE_MARGIN) if earlier is None else earlier)
            run(state, PACED_STEPS)
            scale = _slowest(state, links * SCALE_MARGIN)
    _start_pacing(state, scale)
    return scale


def settle_time_scale(state: TrainState, step: int) -> None:
    """Choose the pace again at the first log line, by the steps until then.

    A rehearsal of seconds may fall into a moment in which the machine is quick or busy. The steps until the
    first line count for no result (`Totals.after_warmup`). All ranks call it with each line.
    """
    config, links = state.config, state.engine.paced_links
    if state.time_scale is None or config.hardware.time_scale is not None or step != config.trainer.log_every:
        return
    if any(link is not state.hook for link in links):  # another strategy's, which has times of its own
        return
    needed = _slowest(state, state.hook.real_ratio() * SCALE_MARGIN)
    if not FAR_BELOW * state.time_scale <= needed <= state.time_scale:
        state.time_scale = needed
        state.communicator.barrier()
        state.backend.start_pacing(needed)
        state.hook.change_pace(needed)


def _slowest(state: TrainState, links: float) -> float:
    """Return the smallest scale that no rank's passes outrun, nor its links."""
    needed = torch.tensor([max(state.backend.rehearsal_scale() or 0.0, links)], dtype=torch.float64)
    return float(state.communicator.all_reduce(needed, "max"))


def _start_pacing(state: TrainState, scale: float) -> None:
    state.communicator.barrier()
    state.backend.start_pacing(scale)
    state.engine.start_pacing(scale)


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


def _real_steps(state: TrainState, steps: int) -> None:
    """Train so many steps."""
    divisor = state.strategy.gradient_divisor(state.communicator.world_size)
    scale = copy.copy(state.loss_scale)  # the training starts with its own
    normalizer = LossNormalizer(StepMessage(state.communicator), divisor, loss_scale=scale)
    meter = StepTimer(state.backend)
    for batch in state.engine.batches(Progress().position, steps):
        state.engine.step(-1, batch, normalizer, meter)
    state.backend.pause()  # the update ends before an exchange that is no part of the step
    state.engine.rehearse_exchange()

"""The engine of strategies whose ranks take one common step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fake_ranks import FakeExchange
from torch import nn

from hetexp.comm.communicator import SoloCommunicator
from hetexp.comm.hook import GradientHook
from hetexp.strategy.single import Single
from hetexp.training.state import TrainState


class Own(Single):
    """Exchanges in a way of its own, and by no hook."""

    name = "own"

    def exchanged_bytes(self, model: nn.Module, world_size: int) -> int | None:
        return 100


def test_a_hook_that_carried_nothing_does_not_count(make_state: Callable[..., TrainState]) -> None:
    state = make_state(SoloCommunicator(), strategy=Own())
    hook = state.hook = GradientHook(FakeExchange(SoloCommunicator()), "float32", 1)
    try:
        assert state.engine.sent_bytes(4) == 100
        hook.average(torch.ones(6), [])
        assert state.engine.sent_bytes(4) == 6
    finally:
        hook.close()

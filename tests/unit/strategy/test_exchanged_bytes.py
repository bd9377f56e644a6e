"""What each strategy hands to the exchange of a step's gradients."""

from __future__ import annotations

import pytest
from torch import nn

from hetexp.plan.strategy import Strategy
from hetexp.strategy.ddp import DDP
from hetexp.strategy.independent import Independent
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.single import Single


@pytest.mark.parametrize(
    ("strategy", "sent"),
    [(DDP(), 8 * (3 * 4 + 4)), (Single(), 0), (Independent(), 0), (LocalSGD(), None)],
    ids=lambda value: getattr(value, "name", None),
)
def test_trained_parameters_travel_once(strategy: Strategy, sent: int | None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).double()
    model[1].requires_grad_(False)
    assert strategy.exchanged_bytes(model, 2) == sent


def test_a_rank_alone_sends_nothing() -> None:
    assert DDP().exchanged_bytes(nn.Linear(2, 2), 1) == 0

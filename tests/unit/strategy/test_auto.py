"""`strategy=auto` stands for another one until ranks start."""

from __future__ import annotations

import pytest
import torch
from support import unbuilt_config
from torch import nn

from hetexp.core.config import read_config
from hetexp.strategy.auto import Auto


def test_it_refuses_to_pick_from_nothing() -> None:
    config = read_config(unbuilt_config())
    assert Auto().check(config, []) == []
    assert Auto(["ddp"]).check(config, []) == []
    assert Auto([]).check(config, []) == [
        "`strategy.among` must name at least one strategy, but is [] instead. null means all."
    ]


def test_no_rank_trains_with_it() -> None:
    for use in (
        lambda: Auto().wrap(nn.Linear(1, 1), torch.device("cpu")),
        lambda: Auto().accumulate(nn.Linear(1, 1)),
        lambda: Auto().gradient_divisor(2),
    ):
        with pytest.raises(RuntimeError, match="replaced by another strategy before ranks start"):
            use()

"""Averages of a few ranks between syncs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support import plan_on, unbuilt_config

from hetexp.core.cost.calibration import Exchange
from hetexp.core.errors import ConfigError
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.local_sgd.rounds import rounds_of

Rounds = Sequence[Sequence[Sequence[int]]]


class Grouped(LocalSGD):
    """Has rounds of fixed groups."""

    def __init__(self, rounds: Rounds, sync_every: int = 50) -> None:
        super().__init__(sync_every)
        self._groups = rounds

    def rounds(self, world_size: int) -> Rounds:
        return self._groups


def test_ranks_of_a_group_are_in_order_and_a_rank_alone_is_in_none() -> None:
    assert rounds_of(Grouped([[[2, 0], [1, 3]], [[4]]]), 5) == [[(0, 2), (1, 3)], []]


@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0, 0]], [[0, 3]], [[-1, 0]]])
def test_other_ranks_and_common_ones_are_refused(groups: list[list[int]]) -> None:
    with pytest.raises(ConfigError) as refused:
        rounds_of(Grouped([[], groups]), 3)
    accepted = "groups without a common rank, of ranks from 0 to 2"
    assert refused.value.problems == [f"`strategy.rounds` must be {accepted}, but is {groups} instead."]


def test_a_prediction_counts_rounds_between_syncs() -> None:
    cpus = [CpuBackend.describe(index) for index in range(4)]
    plan, exchange = plan_on(cpus, unbuilt_config()), Exchange(((1.0, 10**8),))

    def seconds(rounds: Rounds, every: int) -> float:
        return Grouped(rounds, every).step_exchange(exchange, plan, cpus).other_seconds

    sync, pair = seconds([], 1), seconds([[[0, 1], [2, 3]]], 10**9)
    assert 0 < pair < sync
    assert seconds([[[0, 1]]], 1) == sync  # each step syncs
    assert seconds([[[0, 1], [2, 3]]], 10) == pytest.approx(sync / 10 + pair * 0.9)
    assert seconds([[[0, 1]], []], 10) == pytest.approx(sync / 10 + pair / 2 * 0.9)

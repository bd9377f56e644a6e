"""Averages of a few ranks between syncs."""

from __future__ import annotations

import pytest

from hetexp.core.errors import ConfigError
from hetexp.strategy.local_sgd.engine import own_group


def test_a_rank_averages_with_its_group() -> None:
    assert own_group([[2, 0], [1, 3]], 0, 5) == (0, 2)
    assert own_group([[2, 0], [1, 3]], 4, 5) == (4,)


@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0, 0]], [[0, 3]], [[-1, 0]]])
def test_other_ranks_and_common_ones_are_refused(groups: list[list[int]]) -> None:
    with pytest.raises(ConfigError) as refused:
        own_group(groups, 0, 3)
    accepted = "groups without a common rank, of ranks from 0 to 2"
    assert refused.value.problems == [f"`strategy.rounds` must be {accepted}, but is {groups} instead."]

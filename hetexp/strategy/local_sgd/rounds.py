"""Rounds between syncs, in which a few ranks average their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hetexp.core.errors import ConfigError, must_be
from hetexp.strategy.local_sgd.settings import LocalSettings


def rounds_of(settings: LocalSettings, world_size: int) -> list[list[tuple[int, ...]]]:
    """Return the groups of each round that have several ranks, the ranks of each in rising order.

    Raises:
        ConfigError: a rank is in two groups of a round, or is none of the run's.
    """
    rounds = settings.rounds(world_size)
    for groups in rounds:
        members = Counter(rank for group in groups for rank in group)
        if not members.keys() <= set(range(world_size)) or any(count > 1 for count in members.values()):
            accepted = f"groups without a common rank, of ranks from 0 to {world_size - 1}"
            raise ConfigError(must_be("strategy.rounds", accepted, groups))
    return [[tuple(sorted(group)) for group in groups if len(group) > 1] for groups in rounds]


def mean_of_rounds(rounds: Sequence[Sequence[float]]) -> float:
    """Return the mean time of a round, which lasts as long as its slowest group."""
    return sum(max(groups, default=0.0) for groups in rounds) / len(rounds) if rounds else 0.0

"""Sums over ranks that no single library connects: first inside groups, then between the groups' leaders."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetexp.comm.compression import Compressor
from hetexp.comm.exchange import Exchange
from hetexp.core.topology import Topology


class HierarchicalExchange(Exchange):
    """Sums level by level, and broadcasts the result back down, so that every rank gets the same bits.

    Only the last level compresses, as its bytes cost most. Groups below it sum uncompressed numbers, and each
    group's leader keeps the error of compressing that sum. On all other ranks the feedback stays 0.

    Args:
        levels: of the groups that this rank is in, innermost first: it leads each but the last.
        route: of all ranks.
        rank: among all ranks.
    """

    def __init__(self, levels: Sequence[Exchange], route: Topology, rank: int) -> None:
        self.name, self.rank = route.name, rank
        self.takes_host = all(g.library in ("shm", "gloo") for level in route.levels for g in level)
        groups = route.groups_of(rank)
        self._levels = list(zip(levels, groups, strict=True))
        self._heights = [number for number, level in enumerate(route.levels) for g in level if g in groups]
        self._route = route
        root = route.levels[-1][0]
        self._last = root in groups
        self.size = sum(len(route.below(leader, len(route.levels) - 1)) for leader in root.ranks)

    def sum_(self, tensor: torch.Tensor) -> None:
        for exchange, _ in self._levels:
            exchange.sum_(tensor)
        self._down(tensor)

    def sum_coded_(self, tensor: torch.Tensor, compressor: Compressor, feedback: torch.Tensor) -> None:
        below = self._levels[:-1] if self._last else self._levels
        for exchange, _ in below:
            exchange.sum_(tensor)
        if self._last:
            self._levels[-1][0].sum_coded_(tensor, compressor, feedback)
        self._down(tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        table = tensor.new_zeros((self.size, len(tensor)))
        table[self.rank] = tensor
        for height, (exchange, group) in zip(self._heights, self._levels, strict=True):
            below = [list(self._route.below(rank, height)) for rank in group.ranks]
            most = max(map(len, below))
            local = table[below[exchange.rank]]
            local = torch.cat([local, local.new_zeros((most - len(local), len(tensor)))])
            for ranks, rows in zip(below, exchange.gather(local.view(-1)), strict=True):
                table[ranks] = rows.view(most, len(tensor))[: len(ranks)]
        self._down(table)
        return list(table)

    def abandon(self) -> None:
        for exchange, _ in self._levels:
            exchange.abandon()

    def close(self) -> None:
        for exchange, _ in self._levels:
            exchange.close()

    def _down(self, tensor: torch.Tensor) -> None:
        """Broadcast the last level's result to all ranks; those of its group have it already."""
        for exchange, _ in reversed(self._levels[:-1] if self._last else self._levels):
            exchange.broadcast_(tensor)

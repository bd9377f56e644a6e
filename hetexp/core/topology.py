"""How a large tensor is summed over all ranks: level by level, and back down again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """Ranks that sum among themselves."""

    library: str
    """What carries the bytes: `nccl`, `xccl`, `shm` or `gloo`."""
    ranks: tuple[int, ...]
    """Rising; the first one is the leader, which takes the sum on to the next level."""

    @property
    def leader(self) -> int:
        return self.ranks[0]


@dataclass(frozen=True)
class Topology:
    """The groups of every level, from within a vendor's cards outwards.

    A rank is in one group a level at most. One that leads its group, or has none on a level, goes on to the
    next; the others wait for what comes back. Those of the last level's only group have the whole sum.
    """

    levels: tuple[tuple[Group, ...], ...] = ()
    """Empty for a rank that is alone."""

    @classmethod
    def flat(cls, library: str, world_size: int) -> Topology:
        """Return the route of one group of all ranks."""
        return cls(((Group(library, tuple(range(world_size))),),) if world_size > 1 else ())

    @property
    def name(self) -> str:
        """What carries the bytes, from within outwards: `nccl + shm`."""
        return " + ".join(dict.fromkeys(group.library for level in self.levels for group in level))

    @property
    def library(self) -> str | None:
        """What carries all bytes in one group of all ranks; `None` where there are several groups."""
        groups = [group for level in self.levels for group in level]
        return groups[0].library if len(groups) == 1 else None

    def groups_of(self, rank: int) -> list[Group]:
        """Return the groups that a rank is in, from within outwards."""
        return [group for level in self.levels for group in level if rank in group.ranks]

    def below(self, rank: int, level: int) -> tuple[int, ...]:
        """Return the ranks whose sum a rank brings along to a level, itself first."""
        ranks = [rank]
        for groups in reversed(self.levels[:level]):
            led = {group.leader: group.ranks[1:] for group in groups}
            ranks += [member for one in list(ranks) for member in led.get(one, ())]
        return tuple(ranks)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Topology:
        """Return what `dataclasses.asdict` made plain and JSON carried."""
        read = [[Group(one["library"], tuple(one["ranks"])) for one in level] for level in raw["levels"]]
        return cls(tuple(tuple(level) for level in read))

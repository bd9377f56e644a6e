"""How a large tensor is summed over all ranks: level by level, and back down again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """Ranks that sum a tensor among themselves."""

    library: str
    """Library of the sum: `nccl`, `xccl`, `shm` or `gloo`."""
    ranks: tuple[int, ...]
    """In rising order; the first rank is the leader, which takes part in the next level."""

    @property
    def leader(self) -> int:
        return self.ranks[0]


@dataclass(frozen=True)
class Topology:
    """The groups of each level, from a vendor's cards outwards.

    A rank is in at most one group of a level. The leader of a group, and a rank without a group, go on to
    the next level, while the others wait for the result. The last level's only group has the whole sum.
    """

    levels: tuple[tuple[Group, ...], ...] = ()
    """Empty for a single rank."""

    @classmethod
    def flat(cls, library: str, world_size: int) -> Topology:
        """Return the topology of one group of all ranks."""
        return cls(((Group(library, tuple(range(world_size))),),) if world_size > 1 else ())

    @property
    def name(self) -> str:
        """The libraries, from the first level outwards: `nccl + shm`."""
        return " + ".join(dict.fromkeys(group.library for level in self.levels for group in level))

    @property
    def libraries(self) -> frozenset[str]:
        """The libraries of all groups."""
        return frozenset(group.library for level in self.levels for group in level)

    @property
    def library(self) -> str | None:
        """The library of one group of all ranks; `None` if there are several groups."""
        groups = [group for level in self.levels for group in level]
        return groups[0].library if len(groups) == 1 else None

    def groups_of(self, rank: int) -> list[Group]:
        """Return the groups of a rank, from the first level outwards."""
        return [group for level in self.levels for group in level if rank in group.ranks]

    def below(self, rank: int, level: int) -> tuple[int, ...]:
        """Return the ranks whose sum a rank has when a level begins, itself first."""
        ranks = [rank]
        for groups in reversed(self.levels[:level]):
            led = {group.leader: group.ranks[1:] for group in groups}
            ranks += [member for leader in list(ranks) for member in led.get(leader, ())]
        return tuple(ranks)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Topology:
        """Return the topology from its `dataclasses.asdict`, after JSON."""
        levels = [[Group(group["library"], tuple(group["ranks"])) for group in lv] for lv in raw["levels"]]
        return cls(tuple(map(tuple, levels)))

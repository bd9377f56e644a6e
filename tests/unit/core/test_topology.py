"""Levels of groups: who is where, who brings what along."""

from __future__ import annotations

import json
from dataclasses import asdict

from hetexp.core.topology import Group, Topology

DEEP = Topology(
    (
        (Group("nccl", (0, 1)), Group("xccl", (3, 4, 5))),
        (Group("shm", (0, 2, 3)), Group("shm", (6, 7))),
        (Group("gloo", (0, 6)),),
    )
)


def test_names() -> None:
    assert DEEP.name == "nccl + xccl + shm + gloo"
    assert DEEP.library is None
    assert (Topology.flat("shm", 3).name, Topology.flat("shm", 3).library) == ("shm", "shm")
    assert Topology.flat("gloo", 1) == Topology()
    assert (Topology().name, Topology().library, Topology().groups_of(0)) == ("", None, [])


def test_groups_of_a_rank_from_within_outwards() -> None:
    assert [group.library for group in DEEP.groups_of(0)] == ["nccl", "shm", "gloo"]
    assert [group.ranks for group in DEEP.groups_of(4)] == [(3, 4, 5)]
    assert [group.leader for group in DEEP.groups_of(7)] == [6]


def test_what_a_rank_brings_along() -> None:
    assert DEEP.below(3, 0) == (3,)
    assert sorted(DEEP.below(3, 1)) == [3, 4, 5]
    assert sorted(DEEP.below(0, 2)) == [0, 1, 2, 3, 4, 5]
    assert DEEP.below(0, 2)[0] == 0
    assert sorted([*DEEP.below(0, 2), *DEEP.below(6, 2)]) == list(range(8))


def test_json_carries_it() -> None:
    assert Topology.from_dict(json.loads(json.dumps(asdict(DEEP)))) == DEEP

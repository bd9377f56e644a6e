"""The list of machines: everything wrong with it is told at once, without asking any machine."""

from __future__ import annotations

from typing import Any

import pytest
from support import unbuilt_config

from hetexp.core.config import check_config

TWO: list[dict[str, Any]] = [{"name": "a", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.2"}]


def problems(hosts: list[dict[str, Any]], node: str | None = None) -> list[str]:
    return check_config(unbuilt_config(cluster={"hosts": hosts}) | {"node": node})[1]


def test_two_machines_are_right() -> None:
    assert problems(TWO) == []
    assert problems([]) == []
    assert problems(TWO, "b") == []


@pytest.mark.parametrize(
    ("hosts", "node", "told"),
    [
        (TWO[:1], None, "`cluster.hosts` must name at least two machines, but names one."),
        ([TWO[0], {**TWO[1], "name": "A"}], None, "`cluster.hosts[1].name` must be another one than that of"),
        ([TWO[0], {**TWO[1], "address": "10.0.0.1"}], None, "`cluster.hosts[1].address` must be another one"),
        ([TWO[0], {**TWO[1], "name": "b c"}], None, "`cluster.hosts[1].name` must be 1 to 63 letters"),
        (
            [TWO[0], {**TWO[1], "address": "127.0.1.1"}],
            None,
            "must be no loopback address, but is '127.0.1.1'",
        ),
        ([TWO[0], {**TWO[1], "devices": [{"devcie": "cpu"}]}], None, "`cluster.hosts[1].devices[0].devcie`"),
        ([TWO[0], {**TWO[1], "addres": "x"}], None, "`cluster.hosts[1].addres` is not a key"),
        (TWO, "c", "`node` must be one of a, b, but is 'c' instead."),
        ([], "c", "`node` must be null without `cluster.hosts`, but is 'c' instead."),
    ],
)
def test_each_mistake_is_told_with_its_key(hosts: Any, node: str | None, told: str) -> None:
    (problem,) = problems(hosts, node)
    assert told in problem


def test_all_mistakes_are_told_at_once() -> None:
    wrong = [TWO[0], {"name": "a", "address": "10.0.0.1", "devices": [{"devcie": "cpu"}]}]
    assert len(problems(wrong, "c")) == 4


def test_loopback_addresses_alone_are_one_machine_that_plays_several() -> None:
    assert problems([{"name": "a", "address": "127.0.0.2"}, {"name": "b", "address": "127.0.0.3"}]) == []

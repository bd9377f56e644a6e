"""`strategy=hybrid`: groups and cuts that do not fit are told before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from support import unbuilt_config

from hetexp.core.config import read_config
from hetexp.core.instantiate import check_component
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.strategy.hybrid import Hybrid

CPUS = [CpuBackend.describe(index) for index in range(4)]
TARGET = "hetexp.strategy.hybrid.Hybrid"


def problems(count: int, **arguments: Any) -> list[str]:
    node = {"_target_": TARGET, **arguments}
    assert check_component("strategy", node) == []
    return Hybrid(**arguments).check(read_config(unbuilt_config(strategy=node)), CPUS[:count])


def test_groups_that_fit_are_taken() -> None:
    assert problems(4) == []
    assert problems(3, groups=[[0, 1], [2]], shard_plan=[[[0, 4], [4, 6]], [[0, 6]]]) == []
    assert problems(4, groups=[[0, 3], [1, 2]]) == []


@pytest.mark.parametrize(
    ("count", "arguments", "told"),
    [
        (2, {}, "`strategy` must be ddp or pipeline for fewer than three devices (cpu:0, cpu:1)"),
        (3, {"shard_plan": [[[0, 6]]]}, "`strategy.groups` must be given if `strategy.shard_plan` is"),
        (3, {"groups": [[0, 1, 2]]}, "`strategy.groups` must be two lists of ranks or more"),
        (3, {"groups": [[0, 1], [1, 2]]}, "`strategy.groups` must be lists that hold each rank from 0 to 2"),
        (4, {"groups": [[0, 1], [2]]}, "`strategy.groups` must be lists that hold each rank from 0 to 3"),
        (3, {"groups": [[1, 0], [2]]}, "`strategy.groups` must be lists of rising ranks"),
        (
            3,
            {"groups": [[0, 1], [2]], "shard_plan": [[[0, 3], [3, 6]]]},
            "`strategy.shard_plan` must have one list of ranges a group (2), but has 1 instead.",
        ),
        (
            3,
            {"groups": [[0, 1], [2]], "shard_plan": [[[0, 3], [3, 6]], [[0, 3], [3, 6]]]},
            "`strategy.shard_plan[1]` must have one range of layers a stage, which are 1 for schedule",
        ),
        (
            3,
            {"groups": [[0, 1], [2]], "shard_plan": [[[0, 3], [2, 6]], [[0, 6]]]},
            "`strategy.shard_plan[0]` must give each layer to one stage, but [0, 3] and [2, 6] overlap in",
        ),
    ],
)
def test_what_does_not_fit_is_told(count: int, arguments: dict[str, Any], told: str) -> None:
    (problem,) = problems(count, **arguments)
    assert problem.startswith(told)

"""Case 45: each mistake in the layers of stages is named."""

from __future__ import annotations

import pytest

from hetexp.strategy.pipeline.shard_plan import check_layers, check_ranges

LAYERS = [f"blocks.{index}" for index in range(6)]
PLAN = "`strategy.shard_plan"


@pytest.mark.parametrize(
    ("ranges", "told"),
    [
        ([[0, 4], [4, 6]], None),
        (
            [[0, 3], [4, 6]],
            "` must cover the layers without a gap, but leaves out layer 3 between",
        ),
        (
            [[0, 4], [2, 6]],
            "` must give each layer to one stage, but [0, 4] and [2, 6] overlap in layers 2",
        ),
        ([[0, 4], [4, 4], [4, 6]], "[1]` must be a range of at least one layer (first < end), but is [4, 4]"),
        ([[0, 4], [4]], "[1]` must be two numbers of layers, the first one and the end, but is [4] instead."),
        ([[1, 4], [4, 6]], "` must start at layer 0, but starts at layer 1 instead ([[1, 4], [4, 6]])."),
    ],
)
def test_mistakes_whatever_the_model(ranges: list[list[int]], told: str | None) -> None:
    problems = check_ranges(ranges)
    assert len(problems) == (told is not None)
    assert told is None or problems[0].startswith(PLAN + told)


def test_all_mistakes_are_told_at_once() -> None:
    assert len(check_ranges([[1, 3], [4, 6], [5, 8]])) == 3
    assert len(check_ranges([[0, -1], [3, 3]], "strategy.shard_plan[1]")) == 2


def test_layers_that_the_model_does_not_have_or_the_plan_leaves_out() -> None:
    assert check_layers([[0, 4], [4, 6]], LAYERS) == []
    assert check_layers([[0, 4], [4, 8]], LAYERS) == [
        f"{PLAN}` must name layers of the model only (0 to 5, blocks.5), but names layers 6–7 in [4, 8]."
    ]
    assert check_layers([[0, 2], [2, 5]], LAYERS) == [
        f"{PLAN}` must cover all 6 layers of the model, but leaves out layer 5 (blocks.5) after [2, 5]."
    ]

"""What is known of torch's schedules is what torch itself says."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from hetexp.strategy.pipeline.schedules import SCHEDULES, ScheduleName, oldest_release

RELEASE = oldest_release([torch.__version__])
assert RELEASE is not None
THERE = [name for name in get_args(ScheduleName) if SCHEDULES[name].since <= RELEASE]
"""Schedules of this torch."""


def test_older_torchs_lack_what_we_say() -> None:
    for name in set(get_args(ScheduleName)) - set(THERE):
        with pytest.raises(ValueError, match=name):
            schedules.get_schedule_class(name)


@pytest.mark.parametrize("name", THERE)
def test_names_and_kinds_are_torchs(name: str) -> None:
    several = issubclass(schedules.get_schedule_class(name), schedules.PipelineScheduleMulti)
    assert several == (SCHEDULES[name].stages_a_rank > 1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stages_are_on_torchs_ranks(ranks: int) -> None:
    for name, style in (("Interleaved1F1B", "loop"), ("ZBVZeroBubble", "v")):
        mapping: dict[int, int] = generate_stage_to_rank_mapping(ranks, 2 * ranks, style=style)
        assert {i: SCHEDULES[name].rank_of(i, ranks) for i in range(2 * ranks)} == mapping


class _Stage:
    """As much of a stage as torch looks at when it makes a schedule."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = index, stages, ranks
        self.group_rank, self.is_last, self.is_first = 0, index == stages - 1, index == 0
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = nn.Identity()


@pytest.mark.parametrize("name", THERE)
@pytest.mark.parametrize("ranks", [2, 3])
def test_torch_takes_what_we_take(name: str, ranks: int) -> None:
    schedule = SCHEDULES[name]
    stages = schedule.stages_a_rank * ranks
    for count in range(1, 4 * stages):
        made: list[Any] = [_Stage(index, stages, ranks) for index in range(0, stages, ranks)]
        kind: Any = schedules.get_schedule_class(name)
        refused = None
        try:
            kind(made if schedule.stages_a_rank > 1 else made[0], count, loss_fn=lambda *_: None)
        except ValueError as error:
            refused = error
        problem = schedule.microbatches_problem(count, stages, ranks, RELEASE)
        assert (refused is None) == (problem is None), count


@pytest.mark.parametrize("name", get_args(ScheduleName))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [0, 1, 7, 32, 100])
def test_the_number_that_we_choose_is_allowed(name: str, ranks: int, samples: int) -> None:
    schedule = SCHEDULES[name]
    stages = schedule.stages_a_rank * ranks
    count = schedule.num_microbatches(stages, ranks, samples)
    assert schedule.microbatches_problem(count, stages, ranks) is None
    assert count <= max(samples, stages)


def test_numbers_of_stages() -> None:
    assert SCHEDULES["1F1B"].stages_problem(2, 2) is None
    assert SCHEDULES["1F1B"].stages_problem(3, 2) == "2 for schedule 1F1B on 2 devices"
    assert SCHEDULES["Interleaved1F1B"].stages_problem(6, 2) is None
    wanted = SCHEDULES["Interleaved1F1B"].stages_problem(2, 2)
    assert wanted == "a multiple of 2 from 4 on for schedule Interleaved1F1B on 2 devices"
    assert SCHEDULES["DualPipeV"].stages_problem(6, 2) == "4 for schedule DualPipeV on 2 devices"


def test_the_oldest_torch_of_the_ranks_counts() -> None:
    release = oldest_release(["2.13.0+cpu", None, "2.9.1+cu128"])
    assert release == (2, 9)
    assert oldest_release([None]) is None
    assert SCHEDULES["GPipe"].microbatches_problem(1, 2, 2) is None
    wanted = SCHEDULES["GPipe"].microbatches_problem(1, 2, 2, release)
    assert wanted == "at least the 2 stages for schedule GPipe with torch 2.9"
    assert SCHEDULES["GPipe"].microbatches_problem(2, 2, 2, release) is None

"""The pace of emulated devices: what the first steps may change."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetexp.training.measuring.warmup_calibration import settle_time_scale


def state_of(needed: float, other_ranks: float = 0.0, given: float | None = None) -> Any:
    """Return what `settle_time_scale` needs of a rank, with a pace of 100."""
    paces: list[float] = []

    def all_reduce(values: torch.Tensor, _: str) -> torch.Tensor:
        return values.clamp(min=other_ranks)

    hook = SimpleNamespace(real_ratio=lambda: 40.0, change_pace=paces.append)
    return SimpleNamespace(
        time_scale=100.0,
        config=SimpleNamespace(
            hardware=SimpleNamespace(time_scale=given), trainer=SimpleNamespace(log_every=10)
        ),
        backend=SimpleNamespace(rehearsal_scale=lambda: needed, start_pacing=paces.append),
        engine=SimpleNamespace(paced_links=[hook]),
        hook=hook,
        communicator=SimpleNamespace(all_reduce=all_reduce, barrier=nullcontext),
        paces=paces,
    )


@pytest.mark.parametrize(("needed", "other_ranks"), [(130.0, 0.0), (90.0, 130.0)])
def test_the_first_line_slows_a_pace_that_any_rank_outruns(needed: float, other_ranks: float) -> None:
    state = state_of(needed, other_ranks)
    settle_time_scale(state, 10)
    assert (state.time_scale, state.paces) == (130.0, [130.0, 130.0])


@pytest.mark.parametrize(("needed", "expected"), [(70.0, 70.0), (30.0, 60.0)], ids=["passes", "links"])
def test_the_first_line_quickens_a_pace_that_was_found_in_a_busy_moment(
    needed: float, expected: float
) -> None:
    state = state_of(needed)
    settle_time_scale(state, 10)
    assert (state.time_scale, state.paces) == (expected, [expected, expected])


@pytest.mark.parametrize(
    ("needed", "step", "given"),
    [(90.0, 10, None), (130.0, 20, None), (130.0, 10, 100.0)],
    ids=["slow enough", "later line", "given pace"],
)
def test_a_pace_stays(needed: float, step: int, given: float | None) -> None:
    state = state_of(needed, given=given)
    settle_time_scale(state, step)
    assert (state.time_scale, state.paces) == (100.0, [])

"""What a summary says of the samples that steps waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from one_by_one import OneByOne
from torch.utils.data import TensorDataset

from hetexp.comm.communicator import SoloCommunicator
from hetexp.training.measuring.result import loading_of
from hetexp.training.measuring.timer import Totals
from hetexp.training.state import TrainState


def seconds(step: float, wait: float, ahead: float = 0.0) -> Totals:
    return Totals(train_seconds=10 * step, data_seconds=10 * wait, ahead_seconds=10 * ahead, steps=10)


@pytest.mark.parametrize(
    ("workers", "totals", "load", "needed"),
    [
        # Loaded in the step: 0.25 s of 0.35 s a step, and 0.05 s while it waited for the device.
        (0, seconds(0.35, 0.25, 0.05), 0.3, 3),
        (0, seconds(0.11, 0.01), 0.01, 1),
        # Two processes take 0.3 s a step, each of them all the time; a step alone would take 0.1 s.
        (2, seconds(0.3, 0.2), 0.6, 6),
        (0, seconds(0.3, 0.01), None, None),
        (0, seconds(2e-3, 0.9e-3), None, None),
        (4, seconds(0.3, 0.0), None, None),
    ],
)
def test_so_many_processes_load_in_time(
    make_state: Callable[..., TrainState],
    workers: int,
    totals: Totals,
    load: float | None,
    needed: int | None,
) -> None:
    state = make_state(SoloCommunicator(), num_workers=workers)
    data: Any = OneByOne(state.train_data)  # type: ignore[arg-type]
    state.train_data = data
    found = loading_of(state, totals)
    assert found is not None
    assert found["workers"] == needed
    assert found["load_s"] == (None if load is None else pytest.approx(load))


def test_a_thread_that_steps_wait_for_works_all_the_time(make_state: Callable[..., TrainState]) -> None:
    state = make_state(SoloCommunicator())
    assert isinstance(state.train_data, TensorDataset)
    found = loading_of(state, seconds(0.3, 0.2))
    assert found == {"wait_s": pytest.approx(0.2), "load_s": pytest.approx(0.3), "workers": 3}
    assert loading_of(state, Totals()) is None

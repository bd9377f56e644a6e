"""Case 33: random states go where there is such a device, and one warning says which have none."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_ranks import FakeGroup
from safetensors import safe_open
from torch import Tensor, nn

from hetexp.checkpoint.manifest import find_checkpoint
from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.training.loop import train
from hetexp.training.measuring.warmup_calibration import restored_after
from hetexp.training.saving.random_states import FILE, match_states, random_files, restore_random
from hetexp.training.saving.resuming import resume
from hetexp.training.seeding import seed_all, seeded
from hetexp.training.state import TrainState

MakeState = Callable[..., TrainState]


class WithCards(CpuBackend):
    """Pretends that a rank drives cards with random numbers of their own."""

    def __init__(self, spec: Any, states: list[Tensor]) -> None:
        super().__init__(spec)
        self.states = states

    def random_states(self) -> list[Tensor]:
        return self.states

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        self.states = list(states)


def parts_on(make_state: MakeState, communicator: Communicator, devices: Sequence[str]) -> TrainState:
    """Return a rank's parts on devices of these names, such as `cuda:1`; each card's state is its number."""
    state = make_state(communicator, [1.0] * len(devices))
    specs = [
        replace(spec, id=name, backend=name.partition(":")[0], index=int(name.partition(":")[2] or 0))
        for spec, name in zip(state.plan.devices, devices, strict=True)
    ]
    state.plan = replace(state.plan, devices=tuple(specs))
    mine = specs[state.rank]
    states = [torch.full((16,), mine.index, dtype=torch.uint8)] if mine.backend != "cpu" else []
    state.backend = WithCards(mine, states)
    return state


def saved_by(make_state: MakeState, devices: Sequence[str], folder: Path) -> None:
    """Write the file of a run on these devices."""

    def rank(communicator: Communicator) -> dict[str, bytes]:
        return random_files(parts_on(make_state, communicator, devices))

    told = FakeGroup(len(devices)).run(rank)
    assert all(not one for one in told[1:])
    (folder / FILE).write_bytes(told[0][FILE])


@pytest.mark.parametrize(
    ("saved", "now", "host", "cards"),
    [
        (["cuda", "xpu"], ["cuda", "xpu"], [0, 1], [0, 1]),
        (["cuda", "xpu"], ["xpu", "cuda"], [0, 1], [1, 0]),
        (["cuda", "xpu", None], [None], [0], [None]),
        (["cuda"], ["cuda", "cuda", None], [0, None, None], [0, None, None]),
        ([None, None], ["mps"], [0], [None]),
        (["hip"], ["cuda"], [0], [None]),
    ],
)
def test_who_goes_on_with_whose(saved: Any, now: Any, host: Any, cards: Any) -> None:
    assert match_states(saved, now) == (host, cards)


def draw() -> tuple[Any, ...]:
    """Draw from every generator of the process; an odd number of normal numbers leaves a second one over."""
    return (
        *(random.random(), random.gauss(0.0, 1.0), float(np.random.rand()), float(np.random.randn())),
        *torch.rand(2).tolist(),
    )


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32 + 5])
def test_a_seed_is_one_of_all_generators(seed: int) -> None:
    """Also beyond what NumPy takes: a rank's seed is above the run's."""
    told = []
    for number in (seed, seed + 1, seed):
        seed_all(number)
        told.append(draw())
    after = draw()
    assert told[0] == told[2]
    assert all(one != other for one, other in zip(told[0], told[1], strict=True))
    seed_all(seed)
    assert draw() == told[0]
    with seeded(seed + 1):
        assert draw() == told[1]
    assert draw() == after


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_what_is_undone_has_drawn_nothing(make_state: MakeState, device: str) -> None:
    """A calibration is made once and kept: the runs after it draw what the first one did."""
    parts = parts_on(make_state, SoloCommunicator(), [device])
    before = parts.backend.random_states()
    seed_all(3)
    expected = draw()
    seed_all(3)
    with restored_after(parts):
        draw()
        parts.backend.set_random_states([state + 1 for state in before])
    assert draw() == expected
    pairs = zip(parts.backend.random_states(), before, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_process_draws_on_as_if_nothing_had_been(make_state: MakeState, tmp_path: Path) -> None:
    draw()
    saved_by(make_state, ["cpu"], tmp_path)
    expected = [draw() for _ in range(3)]
    with safe_open(tmp_path / FILE, "pt", "cpu") as file:  # integers and bytes, nothing else
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.int64", "torch.uint8"}  # noqa: SIM118
        json.loads(file.metadata()["origins"])
    for seed in (3, 4):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        restore_random(parts_on(make_state, SoloCommunicator(), ["cpu"]), tmp_path)
        assert [draw() for _ in range(3)] == expected


def test_cards_of_the_same_kinds_go_on(
    make_state: MakeState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by(make_state, ["cuda:3", "xpu:5", "cpu"], tmp_path)

    def rank(communicator: Communicator) -> list[int]:
        parts = parts_on(make_state, communicator, ["xpu:0", "cuda:1", "cpu"])
        restore_random(parts, tmp_path)
        return [int(state[0]) for state in parts.backend.random_states()]

    assert FakeGroup(3).run(rank) == [[5], [3], []]
    assert not caplog.records


def test_one_warning_lists_the_states_without_a_device(
    make_state: MakeState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by(make_state, ["cuda:0", "xpu:0", "cpu"], tmp_path)
    with caplog.at_level(logging.WARNING):
        restore_random(parts_on(make_state, SoloCommunicator(), ["cpu"]), tmp_path)
    (record,) = caplog.records
    told = record.getMessage()
    assert "those of cuda:0, xpu:0, the process of xpu:0, the process of cpu are lost" in told
    caplog.clear()

    def rank(communicator: Communicator) -> None:
        restore_random(parts_on(make_state, communicator, ["cuda:0", "xpu:0", "cpu", "cuda:1"]), tmp_path)

    FakeGroup(4).run(rank)
    (record,) = caplog.records
    assert "cuda:1 begin with their seeds" in record.getMessage() and "left" not in record.getMessage()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dropout_is_that_of_the_whole_run(make_state: MakeState, tmp_path: Path, num_workers: int) -> None:
    """A run that was resumed in the same layout has the same losses and weights, to the bit."""

    def run(until: int, resumed: bool, whole: bool) -> tuple[list[float], Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4))
        options = {"max_steps": 12, "log_every": 1, "num_workers": num_workers, "eval_every": 2}
        state = make_state(SoloCommunicator(), model=model, **options)
        if resumed:
            object.__setattr__(state.config, "resume", str(find_checkpoint(tmp_path)))
            torch.manual_seed(99)
        progress = resume(state)
        state.total_steps = until
        if whole:
            state.config.trainer.__dict__["fast_dev_run"] = 1  # writes nothing
        train(state, progress)
        recorded: Any = state.loggers[0]
        losses = [line["train/loss"] for _, line in recorded.lines if "train/loss" in line]
        return losses, torch.cat([p.detach().flatten() for p in state.model.parameters()])

    losses, weights = run(12, False, True)
    first, _ = run(5, False, False)
    rest, end = run(12, True, False)
    assert first + rest == losses
    assert torch.equal(end, weights)

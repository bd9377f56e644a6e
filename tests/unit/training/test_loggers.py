"""What trackers get of the runs before the one that they track."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetexp.comm.communicator import SoloCommunicator
from hetexp.logger.base import Logger, RunInfo
from hetexp.training import wiring
from hetexp.training.state import TrainState
from hetexp.training.wiring import start_loggers

MakeState = Callable[..., TrainState]


class Told(Logger):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.group: str | None = None

    def start(self, run: RunInfo) -> None:
        self.group = run.group

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        self.steps.append(step)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        pass


@pytest.fixture
def begin(
    make_state: MakeState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[TrainState, Told]]:
    def begin(name: str, before: TrainState | None = None, step: int = 0) -> tuple[TrainState, Told]:
        told = Told()
        monkeypatch.setattr(wiring, "instantiate", lambda _: told)
        state = make_state(SoloCommunicator())
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        state.plan = replace(state.plan, run_id=name, run_dir=str(folder))
        if before is not None:
            checkpoint = Path(before.plan.run_dir, "checkpoints", f"step_{step:08}")
            state.config = state.config.model_copy(update={"resume": str(checkpoint)})
            # As `resume` reads it from the checkpoint.
            state.resumed_from = {"run_id": before.plan.run_id, "group": before.group, "step": step}
        state.loggers = start_loggers(state)
        return state, told

    return begin


def log(state: TrainState, steps: Iterable[int]) -> None:
    for step in steps:
        for logger in state.loggers:
            logger.log({"train/loss": 1 / step}, step)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_tracker_gets_all_steps_of_the_runs_before(begin: Any, tmp_path: Path) -> None:
    first, told = begin("first")
    log(first, range(1, 6))
    assert (told.steps, told.group) == ([1, 2, 3, 4, 5], "first")

    second, told = begin("second", first, 3)
    log(second, range(4, 8))
    assert (told.steps, told.group) == ([1, 2, 3, 4, 5, 6, 7], "first")
    assert steps_in(tmp_path / "second" / "metrics.jsonl") == [4, 5, 6, 7]

    # It goes on in its own folder, where no checkpoint of the first run is any more.
    again, told = begin("second", second, 5)
    assert told.steps == [1, 2, 3, 4, 5, 6, 7]
    log(again, [6])

    third, told = begin("third", again, 6)
    log(third, [7])
    assert (told.steps, told.group) == ([1, 2, 3, 4, 5, 6, 7], "first")


def test_a_checkpoint_without_its_runs_metrics(begin: Any, tmp_path: Path) -> None:
    """A copy of a checkpoint trains on all the same, and its tracker begins there."""
    first, _ = begin("first")
    (tmp_path / "first" / "metrics.jsonl").unlink()
    second, told = begin("second", first, 3)
    log(second, [4])
    assert (told.steps, told.group) == ([4], "first")
    assert not (tmp_path / "second" / "metrics_before.jsonl").exists()


def test_a_sweeps_group_wins(begin: Any, make_state: MakeState) -> None:
    first, _ = begin("first")
    second = make_state(SoloCommunicator())
    second.resumed_from = {"run_id": "first", "group": first.group, "step": 1}
    second.plan = replace(second.plan, group="sweep")
    assert second.group == "sweep"
    second.plan = replace(second.plan, group=None)
    assert second.group == "first"
    second.resumed_from = {"run_id": "old", "group": None, "step": 1}  # of an older checkpoint
    assert second.group == "old"

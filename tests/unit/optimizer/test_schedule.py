"""Schedules of torch's classes: the rates of torch's own loop, at any point of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from hetexp.core.config import TrainerConfig
from hetexp.core.errors import ConfigError
from hetexp.optimizer.build import follow_schedule, restart_schedule, schedule_of
from hetexp.optimizer.schedule import ClassSchedule

STEPS, EPOCH = 12, 4
NAME = "torch.optim.lr_scheduler"


def optimizer_of(**options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
    return torch.optim.SGD(groups, momentum=0.9, **options)


def built(
    node: dict[str, Any], optimizer: torch.optim.Optimizer | None = None, **trainer: Any
) -> ClassSchedule:
    config = TrainerConfig(global_batch_size=8, schedule=node, **trainer)
    schedule = schedule_of(optimizer or optimizer_of(), config, STEPS, EPOCH)
    assert isinstance(schedule, ClassSchedule)
    return schedule


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


CLASSES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "OneCycleLR": ({"max_lr": 0.5}, lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=STEPS)),
    "CosineAnnealingLR": ({}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
    "StepLR": ({"step_size": 3}, lambda o: lr_scheduler.StepLR(o, 3)),
    "PolynomialLR": ({"total_iters": None}, lambda o: lr_scheduler.PolynomialLR(o, STEPS)),
    "CyclicLR": (
        {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 2},
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, 2),
    ),
    "CosineAnnealingWarmRestarts": ({"T_0": 5}, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5)),
    "SequentialLR": (
        {
            "schedulers": [
                {"_target_": f"{NAME}.LinearLR", "start_factor": 0.1, "total_iters": 4},
                {"_target_": f"{NAME}.ExponentialLR", "gamma": 0.5},
            ],
            "milestones": [4],
        },
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.5)], [4]
        ),
    ),
}


def torchs_own(make: Callable[[Any], Any]) -> list[Any]:
    optimizer = optimizer_of()
    scheduler, found = make(optimizer), []
    for _ in range(STEPS):
        found.append(rates(optimizer))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_rates_are_those_of_torchs_loop_from_any_point(name: str) -> None:
    arguments, make = CLASSES[name]
    expected = torchs_own(make)
    schedule = built({"_target_": f"{NAME}.{name}", **arguments})
    for step in range(STEPS):
        assert rates(schedule.optimizer) == expected[step], step
        if step % 3:
            schedule.step()
        else:
            restart_schedule(schedule, step + 1)  # a step that was left out
    for step in (7, 3, 11, 0):  # resumed, broken off, after a warm-up of the devices
        follow_schedule(schedule, step, 0, None)
        assert rates(schedule.optimizer) == expected[step], step


def test_epochs_and_a_warm_up_before() -> None:
    schedule = built(
        {"_target_": f"{NAME}.ExponentialLR", "gamma": 0.5}, schedule_every="epoch", warmup_steps=3
    )
    found: list[float] = []
    states: list[Any] = [None]
    for step in range(STEPS):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
        if (step + 1) % EPOCH == 0:
            states.append(schedule.unit_over())
    assert found == [0.25, 0.5, 0.75, 1.0, *[0.5] * 4, *[0.25] * 4]
    again = built({"_target_": f"{NAME}.ExponentialLR", "gamma": 0.5}, schedule_every="epoch", warmup_steps=3)
    for step in (6, 1, 11, 3):
        follow_schedule(again, step, step // EPOCH, states[step // EPOCH])
        assert again.optimizer.param_groups[0]["lr"] == found[step], step


PLATEAU = {"_target_": f"{NAME}.ReduceLROnPlateau", "patience": 1, "factor": 0.5, "cooldown": 1}
LOSSES = [1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.4, 0.5, 0.6, 0.7]


def test_a_plateau_goes_on_from_its_state_to_the_bit() -> None:
    optimizer = optimizer_of()
    own = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, cooldown=1)
    schedule = built(PLATEAU, eval_every=1)
    assert schedule.every == "evaluation"
    states: list[Any] = []
    expected = []
    for loss in LOSSES:
        own.step(loss)
        states.append(schedule.unit_over(loss))
        expected.append([rate for rate, _ in rates(optimizer)])
        assert [rate for rate, _ in rates(schedule.optimizer)] == expected[-1]
    assert len({tuple(found) for found in expected}) > 2
    for start in (3, 5):
        resumed = built(PLATEAU, eval_every=1)
        # An evaluation that is done again, since a rank was lost, counts once.
        for _ in range(2):
            follow_schedule(resumed, start, 0, states[start])
            assert [rate for rate, _ in rates(resumed.optimizer)] == expected[start]
            for number in range(start + 1, len(LOSSES)):
                resumed.unit_over(LOSSES[number])
            assert [rate for rate, _ in rates(resumed.optimizer)] == expected[-1]


def test_a_new_rate_on_resume_keeps_the_reductions_so_far() -> None:
    schedule = built(PLATEAU, eval_every=1)
    state = [schedule.unit_over(loss) for loss in (1.0, 2.0, 3.0)][-1]
    optimizer = optimizer_of()
    for group in optimizer.param_groups:
        group["lr"] *= 10
    resumed = built(PLATEAU, optimizer, eval_every=1)
    follow_schedule(resumed, 3, 0, state)
    assert [rate for rate, _ in rates(optimizer)] == pytest.approx([5.0, 0.5])


def test_the_state_of_another_schedule_is_no_use() -> None:
    state = built(PLATEAU, eval_every=1).unit_over(1.0)
    other = built({"_target_": f"{NAME}.ExponentialLR", "gamma": 0.5}, schedule_every="epoch")
    follow_schedule(other, 8, 2, state)
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    plateau = built(PLATEAU, eval_every=1)
    follow_schedule(plateau, 8, 2, other.unit_over())
    assert rates(plateau.optimizer) == [(1.0, 0.9), (0.1, 0.9)]


def test_the_class_judges_its_arguments() -> None:
    with pytest.raises(ConfigError, match=r"`trainer\.schedule`: "):
        built({"_target_": f"{NAME}.OneCycleLR", "max_lr": [0.1, 0.2, 0.3]})
    with pytest.raises(ConfigError, match=r"trainer\.schedule\._target_"):
        built({"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1})

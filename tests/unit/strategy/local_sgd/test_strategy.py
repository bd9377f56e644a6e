"""What speaks against local SGD is told before anything starts, with the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import unbuilt_config
from torch import nn

from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.core.compose.options import group_options
from hetexp.core.config import Config, read_config
from hetexp.core.instantiate import check_component
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.strategy.local_sgd import LocalSGD

CPUS = [CpuBackend.describe(index) for index in range(3)]


def config(**trainer: Any) -> Config:
    return read_config(unbuilt_config(trainer={"global_batch_size": 8, "max_steps": 100, **trainer}))


def test_the_option_has_the_defaults_of_the_class() -> None:
    node = group_options("strategy")["local_sgd"]
    assert check_component("strategy", node) == []
    made = LocalSGD(**{key: value for key, value in node.items() if key != "_target_"})
    assert vars(made) == vars(LocalSGD())


@pytest.mark.parametrize("key", ["eval_every", "checkpoint_every"])
@pytest.mark.parametrize(("every", "steps", "after"), [(50, 20, 50), (50, 51, 100), (7, 20, 21)])
def test_models_are_one_only_at_a_sync(key: str, every: int, steps: int, after: int) -> None:
    (problem,) = LocalSGD(sync_every=every).check(config(**{key: steps}), CPUS)
    assert problem == (
        f"`trainer.{key}` must be a multiple of `strategy.sync_every` ({every}), but is {steps} instead. "
        f"Only at a sync do all devices hold one model. Write trainer.{key}={after}."
    )


def test_multiples_are_fine() -> None:
    assert LocalSGD(sync_every=50).check(config(eval_every=100, checkpoint_every=50), CPUS) == []
    assert LocalSGD(sync_every=1).check(config(eval_every=3), CPUS[:1]) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"outer_nesterov": True},
            "`strategy.outer_momentum` must be above 0 if `strategy.outer_nesterov` is true, but is 0.0 "
            "instead.",
        ),
        (
            {"local_batch_size": 4},
            "`strategy.local_batch_size` must be null unless `strategy.local_steps` is speed, but is 4 "
            "instead.",
        ),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], problem: str) -> None:
    assert LocalSGD(**arguments).check(config(), CPUS) == [problem]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sync_every", 0),
        ("local_steps", "fast"),
        ("outer_lr", 0.0),
        ("outer_momentum", 1.0),
        ("inner_state", "sum"),
        ("wire", "int4"),
    ],
)
def test_wrong_values_are_named(key: str, value: Any) -> None:
    node = group_options("strategy")["local_sgd"] | {key: value}
    (problem,) = check_component("strategy", node)
    assert problem.startswith(f"`strategy.{key}` must be ")


def test_the_model_is_called_as_it_is() -> None:
    model = nn.Linear(2, 2)
    wrapped = LocalSGD().wrap(model, torch.device("cpu"))
    assert isinstance(wrapped, EmptyShareGuard)
    assert torch.equal(wrapped(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert LocalSGD().guard(wrapped) is wrapped
    assert LocalSGD().gradient_divisor(3) == 1

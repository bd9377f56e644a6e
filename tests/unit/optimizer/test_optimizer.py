"""The optimizer and the learning-rate schedule."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import nn

from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import check_component, locate
from hetexp.model.gpt import GPT
from hetexp.optimizer.build import (
    ScheduleKind,
    build_optimizer,
    build_schedule,
    check_optimizer,
    schedule_factor,
)

CONF = Path(__file__).parents[3] / "conf" / "optimizer"
NAMES = ["sgd", "adam", "adamw"]
KINDS = get_args(ScheduleKind)


class OwnAdam(torch.optim.Adam):
    pass


def section(name: str, **changes: Any) -> dict[str, Any]:
    node = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"), resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()} | changes


@pytest.mark.parametrize("name", NAMES)
def test_yaml_has_torch_defaults_but_for_the_learning_rate(name: str) -> None:
    node = section(name)
    assert check_component("optimizer", node) == []
    assert check_optimizer(node) == []
    signature = inspect.signature(locate(node.pop("_target_"))).parameters
    assert node.pop("_partial_") is True
    node.pop("lr")
    for key, value in node.items():
        default = signature[key].default
        assert value == (list(default) if isinstance(default, tuple) else default), key


@pytest.mark.parametrize("name", NAMES)
def test_built_optimizer_descends(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = build_optimizer(section(name), model)
    inputs = torch.rand(16, 3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_only_trainable_parameters_and_tied_ones_once() -> None:
    model = GPT(
        num_layers=1, num_heads=1, embedding_size=4, sequence_length=3, vocab_size=5, tie_weights=True
    )
    model.position_embedding.weight.requires_grad_(False)
    optimizer = build_optimizer(section("adamw"), model)
    given_ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert given_ids.count(id(model.head.weight)) == 1
    assert id(model.position_embedding.weight) not in given_ids
    assert len(given_ids) == len(list(model.parameters())) - 1


@pytest.mark.parametrize(
    ("name", "changes", "fused"),
    [
        ("adamw", {}, True),
        ("adam", {"amsgrad": True}, True),
        ("adamw", {"fused": False}, False),
        ("adamw", {"foreach": True}, None),
        ("adam", {"foreach": False}, None),
        ("sgd", {"momentum": 0.9}, None),  # its kernel refuses the gradients of sparse embeddings
    ],
)
def test_the_device_decides_what_the_section_leaves_open(
    name: str, changes: dict[str, Any], fused: bool | None
) -> None:
    node = section(name, **changes)
    model = nn.Linear(2, 2)
    assert build_optimizer(node, model, fuses=True).param_groups[0]["fused"] is fused
    by_itself = build_optimizer(node, model)  # on the CPU torch chooses, as before
    assert by_itself.param_groups[0]["fused"] is changes.get("fused")


def test_a_persons_own_optimizer_is_built_as_written() -> None:
    node = {"_target_": f"{__name__}.OwnAdam", "_partial_": True}
    assert build_optimizer(node, nn.Linear(2, 2), fuses=True).param_groups[0]["fused"] is None


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="`model` must have a parameter that requires a gradient"):
        build_optimizer(section("sgd"), nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("adamw", {"lr": -1.0}, "learning rate"),  # ValueError
        ("adamw", {"betas": [0.9, 1.5]}, "beta"),
        ("sgd", {"nesterov": True}, "Nesterov"),
        ("sgd", {"learning_rate": 1.0}, "learning_rate"),  # TypeError
    ],
)
def test_refused_values_are_told_before_and_while_building(
    name: str, changes: dict[str, Any], expected: str
) -> None:
    node = section(name, **changes)
    (problem,) = check_optimizer(node)
    assert problem.startswith("`optimizer`: ")
    assert expected in problem
    with pytest.raises(ConfigError) as caught:
        build_optimizer(node, nn.Linear(2, 2))
    assert caught.value.problems == [problem]


def test_what_torch_judges_only_with_parameters_is_refused_while_building() -> None:
    node = section("adamw", fused=True, foreach=True)  # a RuntimeError of torch's
    assert check_optimizer(node) == []
    with pytest.raises(ConfigError, match="foreach"):
        build_optimizer(node, nn.Linear(2, 2))


def test_what_is_no_optimizer_is_refused() -> None:
    assert check_optimizer({"_target_": "builtins.list", "_partial_": True}) == [
        "`optimizer._target_` must build a torch.optim.Optimizer, but builds a builtins.list instead."
    ]


def test_partial_may_be_left_out() -> None:
    optimizer = build_optimizer({"_target_": "torch.optim.SGD", "lr": 0.25}, nn.Linear(2, 2))
    assert optimizer.param_groups[0]["lr"] == 0.25


# The schedule


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0.0]),
    ],
)
def test_factors(kind: ScheduleKind, expected: list[float]) -> None:
    factors = [schedule_factor(step, kind, warmup_steps=3, total_steps=7) for step in range(8)]
    assert factors == pytest.approx(expected)


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), warmup_steps=st.integers(0, 50), length=st.integers(0, 200))
def test_factor_rises_then_falls_and_stays_in_range(
    kind: ScheduleKind, warmup_steps: int, length: int
) -> None:
    total_steps = warmup_steps + length
    factors = [schedule_factor(step, kind, warmup_steps, total_steps) for step in range(total_steps + 5)]
    rise, fall = factors[: warmup_steps + 1], factors[warmup_steps:]
    assert all(a < b for a, b in zip(rise, rise[1:], strict=False))
    assert all(a >= b for a, b in zip(fall, fall[1:], strict=False))
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[0] > 0
    assert factors[warmup_steps] == 1.0
    if kind != "constant" and length:
        assert factors[total_steps:] == pytest.approx([0.0] * 5, abs=1e-12)


def test_scheduler_sets_each_groups_rate_and_resumes_from_its_state() -> None:
    def build() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
        optimizer = torch.optim.SGD(groups)
        return optimizer, build_schedule(optimizer, "cosine", warmup_steps=2, total_steps=10)

    def run(optimizer: Any, scheduler: Any, num_steps: int) -> list[list[float]]:
        rates = []
        for _ in range(num_steps):
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        return rates

    whole = run(*build(), 10)
    assert [rate for rate, _ in whole] == pytest.approx(
        [schedule_factor(step, "cosine", 2, 10) for step in range(10)]
    )
    assert all(math.isclose(second, 0.1 * first) for first, second in whole)
    optimizer, scheduler = build()
    run(optimizer, scheduler, 4)
    resumed_optimizer, resumed = build()
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert run(resumed_optimizer, resumed, 6) == whole[4:]

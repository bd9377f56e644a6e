"""A rank without samples takes part with zeros, and strategies say what speaks against them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import unbuilt_config
from torch import nn

from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.plan.strategy import Strategy
from hetexp.strategy.ddp import DDP
from hetexp.strategy.dp import DP
from hetexp.strategy.single import Single

CPUS = [DeviceSpec(id=f"cpu:{i}", backend="cpu", index=i, name="CPU", vendor="cpu") for i in range(3)]


def config(**trainer: Any) -> Config:
    return Config.model_validate(unbuilt_config(trainer=trainer))


# ---------------------------------------------------------------- the guard


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False)).to(dtype)


class Fails(nn.Linear):
    """Raises an error of its own in each pass."""

    error: Exception

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise self.error


def test_a_rank_out_of_memory_gives_nan_for_every_parameter() -> None:
    """So all ranks learn of it by the exchanged gradient; any other error is raised."""
    net = Fails(3, 2)
    guard = EmptyShareGuard(net)
    guard.catches = True
    net.error = torch.OutOfMemoryError("Out of memory. Tried to allocate 1 GiB")
    guard(torch.ones(1, 3)).backward()
    assert guard.shortage == "Out of memory. Tried to allocate 1 GiB"
    assert all(p.grad is not None and bool(p.grad.isnan().all()) for p in net.parameters())
    guard.shortage, net.error = None, ValueError("a mistake in the model")
    with pytest.raises(ValueError, match="a mistake"):
        guard(torch.ones(1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [None, float("inf"), float("-inf"), float("nan")])
def test_every_parameter_gets_a_gradient_of_zero(dtype: torch.dtype, value: float | None) -> None:
    net = model(dtype)
    if value is not None:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(value)
    output = EmptyShareGuard(net)(None)
    assert output.shape == ()
    assert output.dtype == dtype
    assert output.item() == 0.0
    (output * 0.25).backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        assert parameter.grad.shape == parameter.shape
        assert torch.count_nonzero(parameter.grad) == 0


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan")])
def test_the_gradient_is_zero_whatever_comes_down(factor: float) -> None:
    net = model()
    (EmptyShareGuard(net)(None) * factor).backward()
    assert all(p.grad is not None and torch.count_nonzero(p.grad) == 0 for p in net.parameters())


def test_frozen_parameters_take_no_part() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    EmptyShareGuard(net)(None).backward()
    assert [p.grad is not None for p in net.parameters()] == [False, False, True, True]


def test_tied_parameters_are_one() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    EmptyShareGuard(net)(None).backward()
    (parameter,) = net.parameters()
    assert parameter.grad is not None
    assert torch.count_nonzero(parameter.grad) == 0


def test_an_empty_share_adds_nothing_to_what_is_there() -> None:
    net = model()
    guard = EmptyShareGuard(net)
    guard(torch.randn(4, 3)).sum().backward()
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    guard(None).backward()
    after = [p.grad for p in net.parameters() if p.grad is not None]
    assert len(before) == len(after) == 5
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_hooks_of_every_parameter_run() -> None:
    # DDP counts on them: a parameter whose hook does not run leaves its bucket waiting.
    net = model()
    ran: list[int] = []
    for number, parameter in enumerate(net.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: ran.append(number))
    EmptyShareGuard(net)(None).backward()
    assert sorted(ran) == list(range(5))


def test_samples_go_through_the_model() -> None:
    net = model().eval()
    inputs = torch.randn(4, 3)
    assert torch.equal(EmptyShareGuard(net)(inputs), net(inputs))


def test_a_mapping_becomes_keyword_arguments() -> None:
    class Named(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return ids * mask

    output = EmptyShareGuard(Named())({"mask": torch.tensor([0, 1]), "ids": torch.tensor([5, 6])})
    assert output.tolist() == [0, 6]


# ---------------------------------------------------------------- single


def test_single_takes_one_device() -> None:
    assert Single().check(config(), CPUS[:1]) == []
    (problem,) = Single().check(config(), CPUS[:2])
    assert problem == (
        "`strategy` must be ddp for 2 devices (cpu:0, cpu:1), but is 'single' instead. "
        "Or choose one of them: 'hardware.devices=[cpu:0]'."
    )


def test_single_exchanges_nothing() -> None:
    strategy, net = Single(), model()
    wrapped = strategy.wrap(net, torch.device("cpu"))
    assert {id(p) for p in wrapped.parameters()} == {id(p) for p in net.parameters()}
    assert isinstance(strategy.accumulate(wrapped), nullcontext)
    assert strategy.gradient_divisor(1) == 1
    assert wrapped(None).item() == 0.0


# ---------------------------------------------------------------- ddp


def test_ddp_takes_any_number_of_devices() -> None:
    assert DDP().check(config(), CPUS[:1]) == []
    assert DDP().check(config(accumulate=4), CPUS) == []
    assert DDP().gradient_divisor(3) == 3


@pytest.mark.parametrize(
    ("trainer", "reasons"),
    [
        ({}, []),
        ({"accumulate": 2}, ["false where gradients accumulate over microbatches"]),
        ({"microbatch_size": 2}, ["false where gradients accumulate over microbatches"]),
    ],
)
def test_a_static_graph_must_be_static(trainer: dict[str, Any], reasons: list[str]) -> None:
    problems = DDP(static_graph=True).check(config(**trainer), CPUS[:2])
    assert len(problems) == len(reasons)
    for problem, reason in zip(problems, reasons, strict=True):
        assert problem.startswith(f"`strategy.static_graph` must be {reason}, but is True instead.")
    assert DDP(static_graph=False).check(config(**trainer), CPUS[:2]) == []


def test_names_are_those_of_the_hydra_options() -> None:
    strategies: list[type[Strategy]] = [DDP, DP, Single]
    assert [strategy.name for strategy in strategies] == ["ddp", "dp", "single"]

"""Muon and AdamW as one optimizer: each updates its parameters as it would by itself."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hetexp.checkpoint.optimizer_state import check_optimizer, pack_optimizer, restore_optimizer
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.model.gpt import GPT
from hetexp.optimizer.build import build_optimizer
from hetexp.optimizer.muon import keep_replicas_equal

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
CPU = DeviceSpec(id="cpu:0", backend="cpu", index=0, name="CPU", vendor="cpu")
NODE: dict[str, Any] = {"_target_": "hetexp.optimizer.muon.MuonWithAdamW", "lr": 0.02, "adamw_lr": 0.003}


def model_of() -> GPT:
    torch.manual_seed(0)
    return GPT(
        num_layers=1, num_heads=1, embedding_size=4, sequence_length=3, vocab_size=5, tie_weights=False
    )


def of_muon(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p] for group in optimizer.param_groups if group["muon"] for p in group["params"]}


def steps(model: nn.Module, *optimizers: torch.optim.Optimizer, number: int = 3) -> None:
    for step in range(number):
        for place, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + place)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def test_hidden_matrices_go_to_muon_and_each_updates_as_by_itself() -> None:
    model, other = model_of(), model_of()
    optimizer = build_optimizer(NODE, model)
    names = of_muon(model, optimizer)
    hidden = {name for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name}
    assert names == hidden
    assert optimizer.param_groups[0]["lr"] == 0.02  # the rate that is logged
    theirs = dict(other.named_parameters())
    apart = [
        torch.optim.Muon([theirs[name] for name in hidden], lr=0.02),
        torch.optim.AdamW([p for name, p in theirs.items() if name not in hidden], lr=0.003),
    ]
    steps(model, optimizer)
    steps(other, *apart)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_patterns_name_the_matrices_of_adamw() -> None:
    model = model_of()
    names = of_muon(model, build_optimizer({**NODE, "adamw_match": ["blocks.*", "head.*"]}, model))
    assert names == {"token_embedding.weight", "position_embedding.weight"}


def test_a_saved_state_goes_on_to_the_bit() -> None:
    model = model_of()
    optimizer = build_optimizer(NODE, model)
    steps(model, optimizer)
    twin = copy.deepcopy(model)
    other = build_optimizer(NODE, twin)
    tensors, packed = pack_optimizer(optimizer, {p: name for name, p in model.named_parameters()})
    parameters = dict(twin.named_parameters())
    check_optimizer(packed, other, parameters)
    restore_optimizer({k: v.clone() for k, v in tensors.items()}, packed, other, parameters)
    third = copy.deepcopy(model)
    by_torch = build_optimizer(NODE, third)
    by_torch.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (twin, other), (third, by_torch)):
        for group in its.param_groups:
            group["lr"] *= 0.5  # as a schedule does
        steps(one, its)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name
        assert torch.equal(parameter, dict(third.named_parameters())[name]), name


def test_groups_have_the_options_of_the_optimizer_that_updates_them() -> None:
    model = model_of()
    groups = [{"match": "blocks.*", "weight_decay": 0.7}, {"match": "head.*", "betas": [0.5, 0.6]}]
    optimizer = build_optimizer({**NODE, "groups": groups, "no_decay": True}, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    of_head = [g for g in optimizer.param_groups if names[g["params"][0]].startswith("head")]
    assert of_head and all(g["betas"] == [0.5, 0.6] and not g["muon"] for g in of_head)
    of_blocks = [g for g in optimizer.param_groups if names[g["params"][0]].startswith("blocks")]
    assert {g["muon"] for g in of_blocks} == {True, False}
    assert {g["weight_decay"] for g in of_blocks} == {0.7}
    with pytest.raises(ConfigError, match="betas, which is no option"):
        build_optimizer({**NODE, "groups": [{"match": "blocks.*", "betas": [0.5, 0.6]}]}, model)


def test_a_model_without_a_hidden_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a matrix of a hidden layer"):
        build_optimizer(NODE, nn.Linear(3, 4))


def trained(dtype: torch.dtype, devices: tuple[DeviceSpec, ...] = (), **options: Any) -> torch.Tensor:
    """Return all weights after three steps."""
    model = model_of().to(dtype)
    optimizer = build_optimizer({**NODE, **options}, model)
    keep_replicas_equal(optimizer, devices)
    for step in range(3):
        for place, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + place)
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


UNLIKE = (CPU, replace(CPU, backend="cuda", name="NVIDIA RTX 3090"))


def test_it_computes_in_float64_for_weights_in_float64() -> None:
    exact = trained(torch.float64)
    assert torch.equal(exact, trained(torch.float64, UNLIKE))
    assert not torch.allclose(exact, trained(torch.float64, ns_dtype="bfloat16"), rtol=0, atol=1e-5)
    # One device's rounding is as good as another's.
    assert torch.allclose(exact, trained(torch.float32, ns_dtype="float32").double(), rtol=0, atol=1e-6)


def test_unlike_devices_do_not_compute_in_bfloat16() -> None:
    usual = trained(torch.float32)
    assert torch.equal(usual, trained(torch.float32, (CPU, CPU)))
    assert torch.equal(trained(torch.float32, UNLIKE), trained(torch.float32, ns_dtype="float32"))
    assert not torch.equal(usual, trained(torch.float32, UNLIKE))
    assert torch.equal(usual, trained(torch.float32, UNLIKE, ns_dtype="bfloat16"))


def test_torchs_own_muon_is_warned_of_on_unlike_devices(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.Muon([nn.Parameter(torch.zeros(2, 3))])
    keep_replicas_equal(optimizer, (CPU, CPU))
    assert not caplog.records
    keep_replicas_equal(optimizer, UNLIKE)
    assert "drift apart" in caplog.text

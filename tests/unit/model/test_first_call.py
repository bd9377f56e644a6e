"""Lazy layers get their shapes by one call, which changes nothing else."""

from __future__ import annotations

import pytest
import torch
import unusual_models
from torch import nn

from hetexp.core.errors import ConfigError
from hetexp.hardware.memory.estimate import on_meta
from hetexp.model.base import to_precision
from hetexp.model.first_call import call_once, lazy_names


def test_all_tensors_get_shapes() -> None:
    model = unusual_models.Lazy()
    model.layers[3].eval()
    assert "head.weight" in lazy_names(model)  # of a layer that only training uses
    call_once(model, torch.randn(2, 5, dtype=torch.float64))  # as NumPy's samples are
    assert lazy_names(model) == []
    assert model.head.weight.shape == (4, 5)
    assert type(model.layers[0]) is nn.Linear
    assert [model.training, model.layers[3].training] == [True, False]
    assert float(model.calls) == 0.0
    with on_meta(model) as copied:
        assert copied(torch.empty(3, 5, device="meta")).shape == (3, 4)


def test_the_optimizer_keeps_its_parameters() -> None:
    model = unusual_models.LazyLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call_once(model, torch.randn(2, 5))
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_other_models_are_not_called() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it was called")

    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(refuse)
    call_once(model, torch.zeros(1, 2))


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = unusual_models.LazyLayers()
    call_once(model, torch.randn(2, 5))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (unusual_models.Unfinished(), torch.zeros(2, 5), "left them without a shape"),
        (unusual_models.Lazy(), {"wrong": torch.zeros(2, 5)}, "failed (TypeError"),
    ],
    ids=["unused", "wrong inputs"],
)
def test_what_stays_lazy_is_named(model: nn.Module, inputs: object, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call_once(model, inputs, "Do this.")
    assert reason in str(caught.value)
    assert str(caught.value).endswith("Do this.")


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float64, torch.complex128), (torch.float32, torch.complex64)]
)
def test_complex_tensors_keep_both_parts(dtype: torch.dtype, wide: torch.dtype) -> None:
    model = unusual_models.Spectral()
    before = model.weight.detach().clone()
    identity = model.weight
    assert to_precision(model, dtype) is model
    assert model.weight is identity
    assert (model.weight.dtype, model.phase.dtype, model.head.weight.dtype) == (wide, wide, dtype)
    assert torch.equal(model.weight.detach().to(before.dtype), before)

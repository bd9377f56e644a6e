"""Where a model may be cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetexp.model.convnet import ConvNet
from hetexp.model.gpt import GPT
from hetexp.model.layered import call_layer, pieces_of
from hetexp.model.mlp import MLP

CASES = [
    (
        GPT(num_layers=3, num_heads=2, embedding_size=8, sequence_length=6, vocab_size=5, tie_weights=True),
        torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]]),
    ),
    (MLP([4, 4], input_shape=[3, 2], num_classes=3), torch.randn(5, 3, 2)),
    (ConvNet([8], input_shape=[1, 4, 4], num_classes=3), torch.randn(2, 1, 4, 4)),
    (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)),
]


@pytest.mark.parametrize(("model", "inputs"), CASES, ids=lambda value: type(value).__name__)
def test_the_pieces_one_after_another_are_the_model(model: nn.Module, inputs: torch.Tensor) -> None:
    pieces = pieces_of(model)
    assert pieces is not None
    value = pieces.begin(inputs)
    for name in pieces.layer_names:
        value = call_layer(model.get_submodule(name), value)
    assert torch.equal(pieces.finish(value), model(inputs))


@pytest.mark.parametrize(("model", "inputs"), CASES, ids=lambda value: type(value).__name__)
def test_every_parameter_is_in_a_piece(model: nn.Module, inputs: torch.Tensor) -> None:
    pieces = pieces_of(model)
    assert pieces is not None
    owners = [*pieces.layer_names, *pieces.begin_names, *pieces.finish_names]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert all(any(name == owner or name.startswith(f"{owner}.") for owner in owners) for name in names)


def test_a_model_that_says_nothing_may_not_be_cut() -> None:
    assert pieces_of(nn.Linear(2, 2)) is None


def test_a_tuple_is_a_layers_arguments() -> None:
    layer = nn.Bilinear(2, 3, 1)
    pair = (torch.randn(4, 2), torch.randn(4, 3))
    assert torch.equal(call_layer(layer, pair), layer(*pair))

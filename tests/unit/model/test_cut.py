"""Pieces of a model: what a rank keeps has the whole model's names, and together they compute the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pieced import Masked
from torch import nn

from hetexp.core.errors import ConfigError
from hetexp.model.convnet import ConvNet
from hetexp.model.cut import Piece, Whole, keep_only, whole_of
from hetexp.model.gpt import GPT
from hetexp.model.layered import Pieces
from hetexp.strategy.pipeline.cutting import trace

IMAGES = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0))


def gpt(**changes: Any) -> GPT:
    return GPT(num_layers=4, num_heads=2, embedding_size=8, vocab_size=5, sequence_length=6, **changes)


MODELS: list[tuple[nn.Module, torch.Tensor, list[tuple[int, int]]]] = [
    (gpt(tie_weights=True), TOKENS, [(0, 1), (1, 3), (3, 4)]),
    (gpt(num_experts=2), TOKENS, [(0, 2), (2, 4)]),
    (Masked(), TOKENS, [(0, 1), (1, 3)]),
    (
        ConvNet(widths=[32, 64], blocks_per_width=1, input_shape=[1, 8, 8], num_classes=4),
        IMAGES,
        [(0, 3), (3, 4), (4, 6)],
    ),
    (nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU()), IMAGES, [(0, 1), (1, 3)]),
]


@pytest.mark.parametrize(
    ("model", "inputs", "ranges"), MODELS, ids=["tied", "experts", "masked", "conv", "seq"]
)
def test_pieces_compute_what_the_whole_computes(
    model: nn.Module, inputs: torch.Tensor, ranges: list[tuple[int, int]]
) -> None:
    expected, state = model(inputs), model.state_dict()
    payload: Any = inputs
    names: set[str] = set()
    for one in ranges:
        part = copy.deepcopy(model)
        whole = whole_of(part)
        piece = Piece(part, whole.pieces, *one)
        keep_only(part, whole, [one])
        assert {id(p) for p in piece.parameters()} == {id(p) for p in part.parameters()}
        kept = part.state_dict()
        assert all(torch.equal(kept[name], state[name]) for name in kept)
        names |= set(kept)
        payload = piece(payload)
    torch.testing.assert_close(payload, expected, rtol=0, atol=0)
    assert names == set(state)


def test_inputs_that_are_a_dict_become_keyword_arguments() -> None:
    model = Masked()
    whole, inputs = whole_of(model), {"tokens": TOKENS}
    payload = Piece(model, whole.pieces, 0, 2)(inputs)
    torch.testing.assert_close(Piece(model, whole.pieces, 2, 3)(payload), model(**inputs), rtol=0, atol=0)
    traced = trace(model, whole, inputs, {2})
    assert traced[0] is inputs
    torch.testing.assert_close(traced[2], payload, rtol=0, atol=0)


def test_everything_follows_its_layer() -> None:
    """Parameters, buffers that are not saved, averaged copies and optimizer state: nothing stays behind."""
    model = Masked()
    whole = whole_of(model)
    keep_only(model, whole, [(1, 3)])
    model.to("meta")
    copied = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = [*model.parameters(), *model.buffers(), *copied.module.parameters(), *copied.module.buffers()]
    held += [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {tensor.device.type for tensor in held} == {"meta"}
    assert {name for name, _ in model.named_buffers()} == {"layers.1.shift", "layers.2.shift"}
    assert "scale" not in dict(model.named_parameters())
    assert model.scale is None


def test_a_tied_weight_has_one_name_and_two_holders() -> None:
    whole = whole_of(gpt(tie_weights=True))
    tied = "token_embedding.weight"
    assert whole.parameters["head.weight"] == tied
    assert tied in whole.parameters_of([(0, 1)])
    assert tied in whole.parameters_of([(3, 4)])
    assert tied not in whole.parameters_of([(1, 3)])
    assert whole.buffers_of([(0, 4)]) == set()


def test_frozen_parameters_are_not_trained() -> None:
    model = gpt()
    model.blocks[0].requires_grad_(False)
    assert not any(name.startswith("blocks.0.") for name in whole_of(model).trained)


class _Leaves(nn.Sequential):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self.extra = nn.Parameter(torch.zeros(1))
        self._names = names

    def pieces(self) -> Pieces:
        return Pieces(self._names)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Linear(2, 2), "must say where it may be cut"),
        (nn.Sequential(), "at least one layer"),
        (_Leaves(("0", "1")), "leaves out extra"),
        (_Leaves(("0", "2")), "has no 2"),
        (Masked(normalises=True), "must not normalise over the batch .* head does"),
    ],
)
def test_what_cannot_be_cut_is_told(model: nn.Module, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        whole_of(model)


def test_names_within_a_module_end_at_a_dot() -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(11)])
    whole = Whole.of(model, Pieces(tuple(map(str, range(11)))))
    assert whole.parameters_of([(1, 2)]) == {"1.weight", "1.bias"}

"""Every chance to drop a value is found and set to 0."""

from __future__ import annotations

import torch
from torch import nn

from hetexp.model.dropout import without_dropout
from hetexp.model.gpt import GPT


def test_a_gpt_computes_the_same_twice() -> None:
    model = GPT(num_layers=1, num_heads=2, embedding_size=8, sequence_length=4, vocab_size=5, dropout=0.5)
    tokens = torch.arange(4).unsqueeze(0)
    assert not torch.equal(model(tokens), model(tokens))
    told = without_dropout(model)
    assert torch.equal(model(tokens), model(tokens))
    assert sorted(told) == [
        "blocks.0.attention.dropout.p 0.5",
        "blocks.0.attention.dropout_chance 0.5",
        "blocks.0.mlp.dropout.p 0.5",
        "dropout.p 0.5",
    ]
    assert without_dropout(model) == []


def test_torchs_own_layers_that_are_no_dropout_modules() -> None:
    layers = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(4, 2, dropout=0.3),
            "recurrent": nn.LSTM(4, 4, num_layers=2, dropout=0.2),
            "block": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1),
            "images": nn.Dropout2d(0.4),
            "plain": nn.Linear(4, 4),
        }
    )
    told = without_dropout(layers)
    assert {"attention.dropout 0.3", "recurrent.dropout 0.2", "images.p 0.4"} <= set(told)
    value = torch.randn(3, 2, 4)
    for _ in range(2):
        assert torch.equal(layers["recurrent"](value)[0], layers["recurrent"](value)[0])
        assert torch.equal(layers["block"](value), layers["block"](value))


def test_what_only_sounds_like_it_stays() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_last = True
            self.num_drops = 3
            self.p = 0.5

    model = Pooled()
    assert without_dropout(model) == []
    assert (model.drop_last, model.num_drops, model.p) == (True, 3, 0.5)

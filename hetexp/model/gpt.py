"""A decoder-only transformer: GPT-2's arrangement (Radford et al. 2019), normalisation before each branch."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from hetexp.core.errors import ConfigError, must_be
from hetexp.model.base import unknown
from hetexp.model.layered import Pieces


class GPT(nn.Module):
    """Predicts the next token from the ones before.

    Args:
        num_layers: transformer blocks.
        num_heads: attention heads a block; must divide `embedding_size`.
        embedding_size: numbers that stand for a token between the blocks.
        sequence_length: longest input; `None` leaves it to the data.
        vocab_size: number of different tokens; `None` leaves it to the data.
        dropout: chance to drop a value of the embeddings, the attention and the branches while training.
        tie_weights: use the token embedding as the output layer, too.
        bias: whether linear layers and normalisations have one.

    Raises:
        ConfigError: `num_heads` does not divide `embedding_size`, or `vocab_size` or `sequence_length` is not
            known.
    """

    def __init__(
        self,
        num_layers: PositiveInt = 4,
        num_heads: PositiveInt = 4,
        embedding_size: PositiveInt = 128,
        sequence_length: PositiveInt | None = None,
        vocab_size: PositiveInt | None = None,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        tie_weights: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        problems = self.check(num_heads=num_heads, embedding_size=embedding_size)
        given = {"sequence_length": sequence_length, "vocab_size": vocab_size}
        problems += [unknown(key) for key, value in given.items() if value is None]
        if problems or sequence_length is None or vocab_size is None:
            raise ConfigError(problems)
        self.sequence_length = sequence_length
        self.token_embedding = nn.Embedding(vocab_size, embedding_size)
        self.position_embedding = nn.Embedding(sequence_length, embedding_size)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            [_Block(embedding_size, num_heads, dropout, bias) for _ in range(num_layers)]
        )
        self.norm = nn.LayerNorm(embedding_size, bias=bias)
        self.head = nn.Linear(embedding_size, vocab_size, bias=False)
        self._initialise()
        if tie_weights:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, seq, vocab_size] of tokens [batch, seq], int64.

        Raises:
            ConfigError: `seq` is above `sequence_length`.
        """
        hidden = self._begin(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self._finish(hidden)

    def pieces(self) -> Pieces:
        """Return where the model may be cut (`hetexp.model.layered`): between blocks."""
        return Pieces(
            layer_names=tuple(f"blocks.{index}" for index in range(len(self.blocks))),
            begin_names=("token_embedding", "position_embedding", "dropout"),
            finish_names=("norm", "head"),
            begin=self._begin,
            finish=self._finish,
        )

    def _begin(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.sequence_length:
            accepted = f"at least the {length} tokens of a sample"
            raise ConfigError(must_be("model.sequence_length", accepted, self.sequence_length))
        positions = torch.arange(length, device=tokens.device)
        hidden: Tensor = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        return hidden

    def _finish(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    @staticmethod
    def check(num_heads: int = 4, embedding_size: int = 128, **_: Any) -> list[str]:
        """Return which arguments do not fit together, one sentence a problem."""
        if embedding_size % num_heads == 0:
            return []
        accepted = f"a multiple of `model.num_heads` ({num_heads})"
        return [must_be("model.embedding_size", accepted, embedding_size)]

    def _initialise(self) -> None:
        """Draw weights as GPT-2 does: the sum of all branches starts at about the same size for any depth."""
        for name, module in self.named_modules():
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                continue
            ends_branch = name.endswith(("attention.output", "mlp.output"))
            scale = 1 / math.sqrt(2 * len(self.blocks)) if ends_branch else 1.0
            nn.init.normal_(module.weight, std=0.02 * scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the stream [batch, seq, embedding_size]."""

    def __init__(self, size: int, num_heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size, bias=bias)
        self.attention = _Attention(size, num_heads, dropout, bias)
        self.mlp_norm = nn.LayerNorm(size, bias=bias)
        self.mlp = _Perceptron(size, dropout, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden


class _Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: int, num_heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout_chance = dropout
        self.projections = nn.Linear(size, 3 * size, bias=bias)
        self.output = nn.Linear(size, size, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        # [batch, seq, 3 * size] -> query, key and value, each [batch, heads, seq, size / heads]
        heads = self.projections(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout_chance if self.training else 0.0, is_causal=True
        )
        out: Tensor = self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))
        return out


class _Perceptron(nn.Module):
    """Widens fourfold and back."""

    def __init__(self, size: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.input = nn.Linear(size, 4 * size, bias=bias)
        self.output = nn.Linear(4 * size, size, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.output(functional.gelu(self.input(hidden))))
        return out

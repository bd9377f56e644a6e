"""A decoder-only transformer: GPT-2's arrangement (Radford et al. 2019), normalisation before each branch.

Its perceptrons may be mixtures of experts (`num_experts`). Blocks then pass on a pair: the stream and the
load-balancing loss of each sequence so far.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from hetexp.core.errors import ConfigError, must_be
from hetexp.model.base import WithAuxiliary, unknown
from hetexp.model.layered import Pieces, call_layer


class GPT(nn.Module):
    """Predicts the next token from the ones before.

    Args:
        num_layers: transformer blocks.
        num_heads: attention heads of a block; must divide `embedding_size`.
        embedding_size: length of the vector that stands for a token between the blocks.
        sequence_length: longest input; `None`: the data's.
        vocab_size: number of different tokens; `None`: the data's.
        dropout: chance to drop a value of the embeddings, the attention and the branches while training.
        tie_weights: whether the output layer is the token embedding.
        bias: whether linear layers and normalisations have a bias.
        num_experts: perceptrons of a block, of which each token uses some (mixture of experts); 0: an
            ordinary block.
        experts_per_token: experts that each token uses, the best ones by the block's router.
        balance_weight: weight of the loss that spreads tokens evenly over the experts.

    Raises:
        ConfigError: `num_heads` does not divide `embedding_size`, a token is to use more experts than there
            are, or `vocab_size` or `sequence_length` is not known.
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
        num_experts: NonNegativeInt = 0,
        experts_per_token: PositiveInt = 2,
        balance_weight: NonNegativeFloat = 0.01,
    ) -> None:
        super().__init__()
        problems = self.check(num_heads, embedding_size, num_experts, experts_per_token)
        problems += unknown(sequence_length=sequence_length, vocab_size=vocab_size)
        if problems or sequence_length is None or vocab_size is None:
            raise ConfigError(problems)
        self.sequence_length = sequence_length
        self.token_embedding = nn.Embedding(vocab_size, embedding_size)
        self.position_embedding = nn.Embedding(sequence_length, embedding_size)
        self.dropout = nn.Dropout(dropout)
        self.has_experts = num_experts > 0
        experts = (num_experts, experts_per_token, balance_weight)
        self.blocks = nn.ModuleList(
            [_Block(embedding_size, num_heads, dropout, bias, *experts) for _ in range(num_layers)]
        )
        self.norm = nn.LayerNorm(embedding_size, bias=bias)
        self.head = nn.Linear(embedding_size, vocab_size, bias=False)
        self._initialise()
        if tie_weights:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor | WithAuxiliary:
        """Return logits [batch, seq, vocab_size] of tokens [batch, seq], int64.

        While it trains a mixture of experts, the load-balancing loss of each sequence comes with them.

        Raises:
            ConfigError: `seq` is above `sequence_length`.
        """
        payload = self._begin(tokens)
        for block in self.blocks:
            payload = call_layer(block, payload)
        return self._finish(payload)

    def pieces(self) -> Pieces:
        """Return where the model may be cut (`hetexp.model.layered`): between blocks."""
        return Pieces(
            layer_names=tuple(f"blocks.{index}" for index in range(len(self.blocks))),
            begin_names=("token_embedding", "position_embedding", "dropout"),
            finish_names=("norm", "head"),
            begin=self._begin,
            finish=self._finish,
        )

    def _begin(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        if length > self.sequence_length:
            accepted = f"at least the {length} tokens of a sample"
            raise ConfigError(must_be("model.sequence_length", accepted, self.sequence_length))
        positions = torch.arange(length, device=tokens.device)
        hidden: Tensor = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        return (hidden, hidden.new_zeros(len(tokens))) if self.has_experts else hidden

    def _finish(self, payload: Tensor | tuple[Tensor, Tensor]) -> Tensor | WithAuxiliary:
        hidden, balance = payload if isinstance(payload, tuple) else (payload, None)
        logits: Tensor = self.head(self.norm(hidden))
        return WithAuxiliary(logits, balance) if balance is not None and self.training else logits

    @staticmethod
    def check(
        num_heads: int = 4,
        embedding_size: int = 128,
        num_experts: int = 0,
        experts_per_token: int = 2,
        **_: Any,
    ) -> list[str]:
        """Return which arguments do not fit together, one sentence a problem."""
        problems = []
        if embedding_size % num_heads:
            accepted = f"a multiple of `model.num_heads` ({num_heads})"
            problems.append(must_be("model.embedding_size", accepted, embedding_size))
        if num_experts and experts_per_token > num_experts:
            accepted = f"at most `model.num_experts` ({num_experts})"
            problems.append(must_be("model.experts_per_token", accepted, experts_per_token))
        return problems

    def _initialise(self) -> None:
        """Draw weights as GPT-2 does: the sum of all branches starts at about the same size for any depth."""
        for name, module in self.named_modules():
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                continue
            ends_branch = name.endswith(".output")
            scale = 1 / math.sqrt(2 * len(self.blocks)) if ends_branch else 1.0
            nn.init.normal_(module.weight, std=0.02 * scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the stream [batch, seq, embedding_size]."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        num_experts: int,
        experts_per_token: int,
        balance_weight: float,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size, bias=bias)
        self.attention = _Attention(size, num_heads, dropout, bias)
        self.mlp_norm = nn.LayerNorm(size, bias=bias)
        self.mlp: _Perceptron | _Experts
        if num_experts:
            experts = [_Perceptron(size, dropout, bias) for _ in range(num_experts)]
            self.mlp = _Experts(size, experts, experts_per_token, balance_weight)
        else:
            self.mlp = _Perceptron(size, dropout, bias)

    def forward(self, hidden: Tensor, balance: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the stream; with experts also the balance loss [batch] of all blocks so far."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        if balance is None:
            return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]
        branch, block_balance = self.mlp(self.mlp_norm(hidden))
        return hidden + branch, balance + block_balance


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


class _Experts(nn.Module):
    """Several perceptrons, of which each token uses those that a linear router ranks highest.

    Each expert computes all tokens, and the router's weight is zero for tokens of other experts. So all ranks
    have the same graph for any samples, and an expert without a token has a zero gradient rather than none.

    The balance loss is that of single sequences (DeepSeek-V3, arXiv:2412.19437, equations 17-20), so that it
    does not depend on the split of a batch: with f the fraction of a sequence's choices that fall on an
    expert and P the mean of the router's probabilities for it, `balance_weight` · num_experts · Σ f · P.
    It is at least `balance_weight`, and exactly that if tokens spread evenly.
    """

    def __init__(
        self, size: int, experts: list[_Perceptron], experts_per_token: int, balance_weight: float
    ) -> None:
        super().__init__()
        self.experts_per_token, self.balance_weight = experts_per_token, balance_weight
        self.router = nn.Linear(size, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' branch of the stream, and the balance loss [batch]."""
        probabilities = self.router(hidden).softmax(dim=-1)  # [batch, seq, experts]
        best = probabilities.topk(self.experts_per_token, dim=-1).indices
        chosen = torch.zeros_like(probabilities).scatter(-1, best, 1.0)
        weights = probabilities * chosen
        weights = weights / weights.sum(dim=-1, keepdim=True)
        branches = [weights[..., index, None] * expert(hidden) for index, expert in enumerate(self.experts)]
        fractions = chosen.mean(dim=1) / self.experts_per_token
        evenness = (fractions * probabilities.mean(dim=1)).sum(dim=-1) * len(self.experts)
        return torch.stack(branches).sum(dim=0), self.balance_weight * evenness

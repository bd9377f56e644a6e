"""Models that may be cut, for tests of pipelines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetexp.model.gpt import GPT
from hetexp.model.layered import Pieces


class Frozen(GPT):
    """A GPT of which some parameters are not trained."""

    def __init__(
        self, sequence_length: int | None = None, vocab_size: int | None = None, **arguments: Any
    ) -> None:
        super().__init__(sequence_length=sequence_length, vocab_size=vocab_size, **arguments)
        self.blocks[1].requires_grad_(False)
        self.position_embedding.requires_grad_(False)


class Masked(nn.Module):
    """Hands integers and booleans on beside its numbers, and has buffers that are no parameters.

    Args:
        num_layers: of them.
        size: of the numbers.
        normalises: whether it normalises over the batch.
    """

    def __init__(self, num_layers: int = 3, size: int = 4, normalises: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.layers = nn.ModuleList(_MaskedLayer(size) for _ in range(num_layers))
        self.head = nn.BatchNorm1d(size) if normalises else nn.Linear(size, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        payload = self._begin(tokens)
        for layer in self.layers:
            payload = layer(*payload)
        return self._finish(payload)

    def pieces(self) -> Pieces:
        """Return where it may be cut."""
        return Pieces(
            tuple(f"layers.{index}" for index in range(len(self.layers))),
            ("scale", "table"),
            ("head",),
            self._begin,
            self._finish,
        )

    def _begin(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.get_buffer("table")[tokens][..., None] * self.scale, tokens, tokens > 2

    def _finish(self, payload: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hidden, _, kept = payload
        output: torch.Tensor = self.head((hidden * kept[..., None]).sum(dim=1))
        return output


class _MaskedLayer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("shift", torch.ones(size), persistent=False)

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        shift = self.get_buffer("shift")
        return torch.tanh(self.linear(hidden)) + shift * tokens[..., None], tokens, kept

"""A GPT whose passes give the same bits each time, so that two runs differ by their exchange alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetexp.model.base import WithAuxiliary
from hetexp.model.gpt import GPT


class RepeatableGPT(GPT):
    """The shipped GPT with torch's deterministic kernels, and attention as two products of matrices.

    The backward passes of all fused kernels of attention add up in any order.
    """

    def forward(self, tokens: Tensor) -> Tensor | WithAuxiliary:
        """Return the logits, as `GPT` does."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(tokens)

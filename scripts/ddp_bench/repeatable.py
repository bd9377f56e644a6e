"""A GPT whose passes give the same bits each time, so that two runs differ by their exchange alone."""

from __future__ import annotations

import torch
from torch import Tensor

from hetexp.model.base import WithAuxiliary
from hetexp.model.gpt import GPT


class RepeatableGPT(GPT):
    """The shipped GPT with torch's deterministic kernels: attention's usual backward adds up in any order."""

    def forward(self, tokens: Tensor) -> Tensor | WithAuxiliary:
        """Return the logits, as `GPT` does."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it has no such kernel, and warns of nothing
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        return super().forward(tokens)

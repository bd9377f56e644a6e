"""A model for `scripts/certify.py`: what people freeze and leave unused when they fine-tune."""

from __future__ import annotations

from typing import Any

from hetexp.model.gpt import GPT


class FrozenGPT(GPT):
    """A GPT whose embeddings and first block are not trained.

    Args:
        arguments: of `hetexp.model.gpt.GPT`.
    """

    def __init__(self, vocab_size: int | None = None, sequence_length: int | None = None, **arguments: Any):
        super().__init__(vocab_size=vocab_size, sequence_length=sequence_length, **arguments)
        for part in (self.token_embedding, self.position_embedding, self.blocks[0]):
            part.requires_grad_(False)

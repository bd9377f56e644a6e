"""Seeds and restores the random number generators of Python, NumPy and torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetexp.data.streams.random_numbers import keeping_random_states, seed_host

__all__ = ["keeping_random_states", "seed_all", "seeded"]


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch in this process and on its cards."""
    seed_host(seed)
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the block draw the numbers of a rank after `seed_all`, and restore the process's generators."""
    with keeping_random_states():
        seed_host(seed)  # a launcher touches no card
        yield

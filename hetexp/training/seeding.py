"""Seeds and restores the random number generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch in this process and on its cards."""
    _seed_python_and_numpy(seed)
    torch.manual_seed(seed)


def _seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the block draw the numbers of a rank after `seed_all`, and restore the process's generators."""
    with keeping_random_states():
        _seed_python_and_numpy(seed)
        torch.default_generator.manual_seed(seed)  # a launcher touches no card
        yield


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """Restore this process's generators after the block; those of cards are not touched."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

"""The seeds of what Python, NumPy and torch draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed what Python, NumPy and torch draw in this process, and on its cards."""
    _seed_python_and_numpy(seed)
    torch.manual_seed(seed)


def _seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the block draw what a rank draws after `seed_all`, and put the process's generators back."""
    with undrawn():
        _seed_python_and_numpy(seed)
        torch.default_generator.manual_seed(seed)  # a launcher touches no card
        yield


@contextmanager
def undrawn() -> Iterator[None]:
    """Put this process's generators back after the block; cards have their own."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

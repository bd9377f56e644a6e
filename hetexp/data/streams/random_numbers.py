"""The random number generators of Python, NumPy and torch in this process; those of cards are not touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_host(seed: int) -> None:
    """Seed the generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def random_states() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of the generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_states(states: tuple[Any, Any, torch.Tensor]) -> None:
    """Restore what `random_states` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """Restore the generators after the block."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)

"""Hidden deviations of an emulated card from its model; only the card itself reads them.

Planner and policies see the catalogue's figures. With `hardware.deviation_seed`, a card is faster or slower
by a hidden factor, every pass jitters, and above some batch size a sample costs more. A policy can learn this
only by measuring.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FACTOR_RANGE = (0.6, 1.5)
JITTER = 0.05
KINK_RANGE = (1.1, 1.5)
KINK_BATCHES = (16, 128)


@dataclass
class Deviation:
    """The hidden deviation of one card.

    Args:
        seed: `hardware.deviation_seed`, `None` for a card that is exactly as modelled.
        index: number of the emulated device.
        jitter: largest deviation of a single pass, as a fraction; 0 gives the mean times.
    """

    seed: int | None
    index: int
    jitter: float = JITTER

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed}/{self.index}")
        exact = self.seed is None
        self._factor = 1.0 if exact else self._random.uniform(*FACTOR_RANGE)
        self._kink = 1.0 if exact else self._random.uniform(*KINK_RANGE)
        self._kink_at = self._random.randint(*KINK_BATCHES)
        self._jitter = 0.0 if exact else self.jitter

    def seconds(self, fixed: float, per_sample: float, num_samples: int) -> float:
        """Return the seconds of a pass of this card, instead of `fixed + per_sample · num_samples`."""
        beyond = max(0, num_samples - self._kink_at)
        samples = num_samples + (self._kink - 1.0) * beyond
        jitter = self._random.uniform(1.0 - self._jitter, 1.0 + self._jitter)
        return (fixed + per_sample * samples) * self._factor * jitter

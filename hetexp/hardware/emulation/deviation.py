"""What makes an emulated card differ from its model, as real cards do. Nothing outside the card reads it.

Planner and policies see the catalogue's figures. With `hardware.deviation_seed` a card is really faster or
slower by a hidden factor, every pass jitters, and above some batch size a sample costs more: what a policy
then finds out it must have measured.
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
    """The hidden truth about one card.

    Args:
        seed: `hardware.deviation_seed`, `None` for a card that is exactly as modelled.
        index: number of the emulated device.
        jitter: most that a single pass is off, as a fraction; 0 shows what its passes take on average.
    """

    seed: int | None
    index: int
    jitter: float = JITTER

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed}/{self.index}")
        known = self.seed is None
        self._factor = 1.0 if known else self._random.uniform(*FACTOR_RANGE)
        self._kink = 1.0 if known else self._random.uniform(*KINK_RANGE)
        self._kink_at = self._random.randint(*KINK_BATCHES)
        self._jitter = 0.0 if known else self.jitter

    def seconds(self, fixed: float, per_sample: float, num_samples: int) -> float:
        """Return what a pass of this card takes, instead of `fixed + per_sample · num_samples`."""
        beyond = max(0, num_samples - self._kink_at)
        samples = num_samples + (self._kink - 1.0) * beyond
        jitter = self._random.uniform(1.0 - self._jitter, 1.0 + self._jitter)
        return (fixed + per_sample * samples) * self._factor * jitter

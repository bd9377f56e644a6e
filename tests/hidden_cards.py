"""Cards that deviate from their model in a way that only measuring finds out, on a modelled clock."""

from __future__ import annotations

from hetexp.core.cost.speed import SpeedCurve
from hetexp.hardware.emulation.deviation import Deviation

FIXED, PER_SAMPLE = 1e-5, 1e-5
"""Of a card as its model says it: the fixed cost of a pass in each direction, and of one sample both ways."""


class HiddenCard:
    """A card that deviates from its model; only its passes can be measured."""

    def __init__(self, seed: int, index: int = 0, slower: float = 1.0) -> None:
        self._card, self._slower = Deviation(seed, index), slower

    def forward(self, samples: int) -> float:
        return self._card.seconds(FIXED, self._slower * PER_SAMPLE / 3, samples)

    def backward(self, samples: int) -> float:
        return self._card.seconds(FIXED, self._slower * PER_SAMPLE * 2 / 3, samples)

    def measure(self, samples: int) -> float:
        """One forward and one backward pass, each with its own jitter."""
        return self.forward(samples) + self.backward(samples)

    @property
    def truth(self) -> SpeedCurve:
        per_sample = self._slower * PER_SAMPLE * self._card._factor
        kink = (self._card._kink_at, per_sample * self._card._kink)
        return SpeedCurve(2 * FIXED * self._card._factor, per_sample, (kink,))

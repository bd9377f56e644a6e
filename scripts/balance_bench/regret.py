"""How far the measured policy's split is from the best one, in the model: many random mixes, no process."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

from hetexp.balancing.fit import fit_curve, sizes_to_measure
from hetexp.balancing.solver import solve, step_times
from hetexp.core.speed import SpeedCurve
from hetexp.core.split import Split
from hetexp.hardware.deviation import FACTOR_RANGE, JITTER, KINK_BATCHES, KINK_RANGE
from hetexp.training.calibrate import MOST_OF_SHARE, NUM_SIZES, REPETITIONS

BACKWARD = 2 / 3
"""Of a pass; forward and backward jitter each by themselves."""


def regrets(num_mixes: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Measure and split random mixes as `profiled` does; compare each split with all others.

    Two cards each: every split is tried. More than two have the same error a card, and the solver's exactness
    is the tests' business (`tests/unit/balancing/test_solver.py`).
    """
    draw = random.Random(seed)
    found = sorted(_regret(draw) for _ in range(num_mixes))
    return {
        "mixes": num_mixes,
        "median": statistics.median(found),
        "p95": found[math.ceil(0.95 * num_mixes) - 1],
        "worst": found[-1],
    }


def _regret(draw: random.Random) -> float:
    """Return how much longer the step of the measured split is than that of the best one, as a fraction."""
    total = draw.choice((256, 384, 512))
    rates = (1.0, math.exp(draw.uniform(0.0, math.log(20.0))))
    cards = [_card(draw, rate / total, total) for rate in rates]
    speeds = [1 / card.pass_seconds(total / 8) for card in cards]
    fitted = []
    for card, speed in zip(cards, speeds, strict=True):
        likely = total * speed / sum(speeds)
        largest = min(total, max(4, round(MOST_OF_SHARE * likely)))
        sizes = sizes_to_measure(largest, NUM_SIZES) * REPETITIONS
        fitted.append(fit_curve((size, card.pass_seconds(size) * _jittered(draw)) for size in sizes).curve)

    def seconds(counts: tuple[int, ...]) -> float:
        return max(step_times(cards, Split(counts)))

    best = min(seconds((first, total - first)) for first in range(total + 1))
    return seconds(solve(fitted, total).counts) / best - 1


def _card(draw: random.Random, per_sample: float, total: int) -> SpeedCurve:
    """Return a card with a hidden factor and kink, of the sizes of `hetexp.hardware.deviation`."""
    per_sample *= draw.uniform(*FACTOR_RANGE)
    kink = (draw.randint(*KINK_BATCHES), per_sample * draw.uniform(*KINK_RANGE))
    return SpeedCurve(draw.uniform(0.0, 0.05) * per_sample * total, per_sample, (kink,))


def _jittered(draw: random.Random) -> float:
    forward, backward = (draw.uniform(1 - JITTER, 1 + JITTER) for _ in range(2))
    return (1 - BACKWARD) * forward + BACKWARD * backward

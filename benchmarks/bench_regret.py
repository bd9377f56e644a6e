"""How far the measured policy's split is from the best one, in the model: many random mixes, no process.

    python benchmarks/bench_regret.py [--mixes 2:500,3:200,8:100]

Each number of cards is followed by the number of mixes. `scripts/bench_balancing.py` measures the regret of
two mixes.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hetexp.balancing.fit import fit_curve, median_errors, sizes_to_measure
from hetexp.balancing.solver import solve, step_times
from hetexp.core.cost.speed import BACKWARD_SHARE, SpeedCurve
from hetexp.core.split import Split
from hetexp.hardware.emulation.deviation import FACTOR_RANGE, JITTER, KINK_BATCHES, KINK_RANGE
from hetexp.training.measuring.calibrate import (
    JOINT_STEPS,
    MOST_OF_SHARE,
    MOST_PASSES,
    NUM_SIZES,
    PASSES,
    SURE,
)


def regrets(num_cards: int, num_mixes: int, seed: int = 0) -> dict[str, Any]:
    """Measure and split random mixes as `profiled` does; compare each split with the best one.

    Of two cards every split is tried; of more the best is the solver's with the true curves, whose exactness
    `tests/unit/balancing/test_solver.py` checks.
    """
    draw = random.Random(seed)
    found = sorted(_regret(draw, num_cards) for _ in range(num_mixes))
    return {
        "cards": num_cards,
        "mixes": num_mixes,
        "median": statistics.median(found),
        "p95": found[math.ceil(0.95 * num_mixes) - 1],
        "worst": found[-1],
    }


def _regret(draw: random.Random, num_cards: int) -> float:
    """Return how much longer the step of the measured split is than that of the best one, as a fraction."""
    total = max(256, 64 * num_cards)
    rates = [math.exp(draw.uniform(0.0, math.log(20.0))) for _ in range(num_cards)]
    cards = [_card(draw, rate / total, total) for rate in rates]
    speeds = [1 / card.pass_seconds(total / 8) for card in cards]
    points: list[list[tuple[int, float]]] = []
    for card, speed in zip(cards, speeds, strict=True):
        likely = total * speed / sum(speeds)
        largest = min(total, max(4, round(MOST_OF_SHARE * likely)))
        points.append(_profiled(draw, card, sizes_to_measure(largest, NUM_SIZES)))
    split = solve([fit_curve(one).curve for one in points], total)
    for card, one, count in zip(cards, points, split.counts, strict=True):
        one += _measured(draw, card, [count] * JOINT_STEPS if count else [])
    split = solve([fit_curve(one).curve for one in points], total)

    def seconds(counts: Sequence[int]) -> float:
        return max(step_times(cards, Split(tuple(counts))))

    if num_cards == 2:
        best = min(seconds((first, total - first)) for first in range(total + 1))
    else:
        best = seconds(solve(cards, total).counts)
    return seconds(split.counts) / best - 1


def _profiled(draw: random.Random, card: SpeedCurve, sizes: list[int]) -> list[tuple[int, float]]:
    """Return the passes of a device by itself: up, down, and again where they spread; time sets no limit."""
    points = _measured(draw, card, sizes * 2 * PASSES)
    while True:
        counts = Counter(size for size, _ in points)
        errors = median_errors(points)
        unsure = [size for size in errors if errors[size] > SURE and counts[size] < MOST_PASSES]
        if not unsure:
            return points
        points += _measured(draw, card, unsure * PASSES)


def _measured(draw: random.Random, card: SpeedCurve, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Return passes as `calibrate` would time them; forward and backward jitter each by themselves."""
    points = []
    for size in sizes:
        forward, backward = (draw.uniform(1 - JITTER, 1 + JITTER) for _ in range(2))
        jittered = (1 - BACKWARD_SHARE) * forward + BACKWARD_SHARE * backward
        points.append((size, card.pass_seconds(size) * jittered))
    return points


def _card(draw: random.Random, per_sample: float, total: int) -> SpeedCurve:
    """Return a card with a hidden factor and kink, of the sizes of `hetexp.hardware.emulation.deviation`."""
    per_sample *= draw.uniform(*FACTOR_RANGE)
    kink = (draw.randint(*KINK_BATCHES), per_sample * draw.uniform(*KINK_RANGE))
    return SpeedCurve(draw.uniform(0.0, 0.05) * per_sample * total, per_sample, (kink,))


def mixes_of(text: str) -> dict[int, int]:
    """Read pairs of a number of cards and a number of mixes."""
    pairs = [pair.split(":") for pair in text.split(",")]
    return {int(cards): int(mixes) for cards, mixes in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", type=mixes_of, default="2:500,3:200,8:100")
    print("| random cards | mixes | median | p95 | worst |\n|---|---|---|---|---|")
    for num_cards, num_mixes in parser.parse_args().mixes.items():
        found = regrets(num_cards, num_mixes)
        spread = " | ".join(f"{found[name]:.2%}" for name in ("median", "p95", "worst"))
        print(f"| {num_cards} | {num_mixes:,} | {spread} |", flush=True)


if __name__ == "__main__":
    main()

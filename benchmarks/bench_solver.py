"""How long the solver takes for a large batch over many unequal devices.

    python benchmarks/bench_solver.py [--devices 10000] [--repeats 21]

Printed are milliseconds of `hetexp.balancing.solver.solve`, reading the curves included: `affine` has a
straight curve per device, `cut` also microbatches of 4 to 32, `kinked` also a kink each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from hetexp.balancing.solver import solve
from hetexp.core.cost.speed import SpeedCurve

SAMPLES_PER_DEVICE = 100


def make_curves(kind: str, devices: int, seed: int = 0) -> list[SpeedCurve]:
    """Return curves whose speeds differ by up to 1,000 times."""
    draw = random.Random(seed)
    curves = []
    for _ in range(devices):
        per_sample = 10 ** draw.uniform(-4, -1)
        size = draw.choice((4, 8, 16, 32)) if kind != "affine" else None
        kinks = ((draw.randint(2, 128), per_sample * draw.uniform(1.0, 1.5)),) if kind == "kinked" else ()
        curves.append(SpeedCurve(draw.uniform(0, 0.01), per_sample, kinks, microbatch_size=size))
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    total = SAMPLES_PER_DEVICE * arguments.devices
    print(f"{arguments.devices:,} devices, {total:,} samples, {arguments.repeats} repeats")
    for kind in ("affine", "cut", "kinked"):
        curves = make_curves(kind, arguments.devices)
        seconds = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            split = solve(curves, total)
            seconds.append(time.perf_counter() - start)
        assert split.total == total
        median, slowest = statistics.median(seconds) * 1e3, max(seconds) * 1e3
        print(f"{kind:8} median {median:6.1f} ms, slowest {slowest:6.1f} ms")


if __name__ == "__main__":
    main()

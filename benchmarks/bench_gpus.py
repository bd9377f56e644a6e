"""How long `hetexp gpus` takes as a person types it: a process from start to end, median of several.

python benchmarks/bench_gpus.py [--times 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    command = [sys.executable, "-m", "hetexp.cli", "gpus"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # warms the file cache
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        seconds.append(time.perf_counter() - start)
    print(shown)
    print(f"median {statistics.median(seconds):.2f} s of {times}: {', '.join(f'{s:.2f}' for s in seconds)}")


if __name__ == "__main__":
    main()

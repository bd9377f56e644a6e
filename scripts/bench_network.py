"""Measure strategies between boxes on slow links: `sudo python scripts/bench_network.py --out network.json`.

The boxes are network namespaces of this machine (`scripts/network_lab`), two with two ranks each.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from network_lab.boxes import boxes, problem
from network_lab.jobs import Ran, alone, run

LINKS = (1000.0, 100.0)
"""Mbit/s."""
SYNC_EVERY = 50
JOB = (
    "model=mlp",
    "data=synthetic",
    "data.num_samples=2048",
    "data.num_test_samples=256",
    "logger=none",
    "diagram=false",
    "hardware.threads_per_rank=1",
    "balancing=equal",
    "trainer.global_batch_size=32",
    "trainer.max_epochs=null",
    "trainer.precision=float64",
    "trainer.checkpoint_every=0",
    "optimizer=sgd",
)
STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy=ddp",),
    "pipeline": ("strategy=pipeline",),
    "local_sgd": ("strategy=local_sgd", f"strategy.sync_every={SYNC_EVERY}"),
    "hierarchical_sgd": ("strategy=hierarchical_sgd", f"strategy.sync_every={SYNC_EVERY}"),
}


def measure(folder: Path, steps: int, width: int) -> dict[str, Any]:
    """Return all figures: one row a link and strategy, beside a single device."""
    job = (
        *JOB,
        f"model.hidden_sizes=[{width},{width}]",
        f"trainer.max_steps={steps}",
        f"trainer.eval_every={steps}",
    )
    exact = alone(folder / "single", (*job, "strategy=single", "trainer.log_every=10"))
    rows = []
    for mbit in LINKS:
        with boxes(2, mbit) as lab:
            found = {
                name: run(lab, 2, folder / f"{mbit:g}" / name, (*job, *words, "trainer.log_every=10"))
                for name, words in STRATEGIES.items()
            }
        rows += [row(mbit, name, one, found["ddp"], exact) for name, one in found.items()]
    return {
        "command": " ".join(["python scripts/bench_network.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.system()} {platform.machine()}, {platform.python_version()}",
        "steps": steps,
        "width": width,
        "rows": rows,
    }


def row(mbit: float, name: str, one: Ran, ddp: Ran, exact: Ran) -> dict[str, Any]:
    """Return the figures of one run, compared with ddp's on the same link and with the single device's."""
    pairs = list(zip(one.losses, exact.losses, strict=True))
    return {
        "mbit_per_second": mbit,
        "strategy": name,
        "step_seconds": one.step_seconds,
        "sent_bytes": one.sent_bytes,
        "fewer_bytes": ddp.sent_bytes / one.sent_bytes if one.sent_bytes else math.inf,
        "eval_loss": eval_loss(one),
        "loss_over_ddp": eval_loss(one) / eval_loss(ddp) - 1,
        "from_single": max(abs(mine - its) / abs(its) for mine, its in pairs),
        "exact": one.summary["exact"],
    }


def eval_loss(one: Ran) -> float:
    """Return the loss over the test data at the end."""
    return float(one.summary["final"]["eval"]["loss"])


def table(found: dict[str, Any]) -> str:
    """Return the figures as a table of Markdown."""
    lines = [
        "| link | strategy | s a step | MB between boxes | ddp ÷ its bytes | test loss against ddp "
        "| largest difference from one device |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found["rows"]:
        lines.append(
            f"| {one['mbit_per_second']:g} Mbit/s | {one['strategy']} | {one['step_seconds']:.4f} "
            f"| {one['sent_bytes'] / 1e6:.1f} | {one['fewer_bytes']:.1f} | {one['loss_over_ddp']:+.2%} "
            f"| {one['from_single']:.1e} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256, help="of the two hidden layers")
    arguments = parser.parse_args()
    why = problem()
    if why is not None:
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.steps, arguments.width)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()

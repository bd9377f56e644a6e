"""Measure strategies between boxes on slow links.

    sudo python benchmarks/bench_network.py --out network.json

The boxes are network namespaces of this machine (`benchmarks/network_lab`), each a machine of a cluster.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from network_lab.boxes import boxes, problem
from network_lab.jobs import Ran, alone, predicted, run

LINKS = (1000.0, 100.0)
"""Mbit/s."""
LABS = ((2, 2), (3, 1))
"""Boxes, and ranks in each."""
SYNC_EVERY = 50
SPEED_STEPS = 3 * SYNC_EVERY
JOB = (
    "logger=none",
    "diagram=false",
    "monitor=none",
    "hardware.threads_per_rank=1",
    "trainer.global_batch_size=32",
    "trainer.max_epochs=null",
    "trainer.checkpoint_every=0",
    f"trainer.log_every={SYNC_EVERY}",
    "balancing=equal",
)
SPEED_JOB = (
    *JOB,
    "model=mlp",
    "data=synthetic",
    "data.num_samples=2048",
    "data.num_test_samples=256",
    "trainer.precision=float64",
    "optimizer=sgd",
    f"trainer.max_steps={SPEED_STEPS}",
    f"trainer.eval_every={SPEED_STEPS}",
)
LOSS_JOB = (
    *JOB,
    "model=gpt",
    "model.num_layers=2",
    "model.embedding_size=64",
    "data=text",
    "data.sequence_length=64",
    "trainer.schedule=cosine",
    "trainer.warmup_steps=20",
)
MEASURES = ("strategy=ddp", "balancing=profiled", "balancing.drop_slower=false", "trainer.max_steps=1")
"""A run that measures the devices, for predictions; so short that it tells nothing against them."""
LOCAL = (f"strategy.sync_every={SYNC_EVERY}",)
MOMENTUM = (
    *("strategy.sync_every=25", "strategy.outer_lr=1"),
    *("strategy.outer_momentum=0.5", "strategy.outer_nesterov=true"),
)
STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy=ddp",),
    "pipeline": ("strategy=pipeline",),
    "local_sgd": ("strategy=local_sgd", *LOCAL),
    "hierarchical_sgd": ("strategy=hierarchical_sgd", *LOCAL),
}
FOR_LOSS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "ddp": ("strategy=ddp",),
        "local_sgd": ("strategy=local_sgd", *MOMENTUM),
        "pipeline": ("strategy=pipeline",),
        "pipeline, bfloat16": ("strategy=pipeline", "comm.boundary_wire=bfloat16"),
        "pipeline, int8": ("strategy=pipeline", "comm.boundary_wire=int8"),
    },
    2: {"ddp": ("strategy=ddp",), "hierarchical_sgd": ("strategy=hierarchical_sgd", *MOMENTUM)},
}
"""Ranks in each of two boxes → what they train."""


def speeds(folder: Path, width: int) -> list[dict[str, Any]]:
    """Return what each strategy takes in each lab on each link, what was predicted, and how exact it is."""
    job = (*SPEED_JOB, f"model.hidden_sizes=[{width},{width}]")
    exact = alone(folder / "single", (*job, "strategy=single"))
    rows = []
    for count, ranks in LABS:
        names = [name for name in STRATEGIES if ranks > 1 or name != "hierarchical_sgd"]
        for mbit in LINKS:
            here = folder / f"{count}x{ranks}-{mbit:g}"
            home = here / "home"
            with boxes(count, mbit) as lab:
                run(lab, ranks, here / "measures", home, (*job, *MEASURES))
                steps = predicted(lab, ranks, here / "predicts", home, job)
                for name in names:
                    one = run(lab, ranks, here / name, home, (*job, *STRATEGIES[name]))
                    rows.append(speed_row((count, ranks, mbit), name, one, exact, steps[name]))
    return rows


def speed_row(
    where: tuple[int, int, float], name: str, one: Ran, exact: Ran, predicted_seconds: float
) -> dict[str, Any]:
    """Return the figures of one run, beside the single device's losses and the prediction."""
    count, ranks, mbit = where
    pairs = list(zip(one.losses, exact.losses, strict=True))
    return {
        "boxes": count,
        "ranks_a_box": ranks,
        "mbit_per_second": mbit,
        "strategy": name,
        "predicted_seconds": predicted_seconds,
        "step_seconds": one.step_seconds,
        "sent_bytes": one.sent_bytes,
        "from_single": max(abs(mine - its) / abs(its) for mine, its in pairs),
    }


def losses(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Return the loss that each strategy reaches between two boxes, and the bytes between them."""
    job, rows = (*LOSS_JOB, f"trainer.max_steps={steps}", f"trainer.eval_every={steps}"), []
    with boxes(2, LINKS[0]) as lab:
        for ranks, jobs in FOR_LOSS.items():
            here = folder / f"{ranks}"
            found = {
                name: run(lab, ranks, here / name.replace(", ", "-"), here / "home", (*job, *words))
                for name, words in jobs.items()
            }
            rows += [loss_row(ranks, name, one, found["ddp"]) for name, one in found.items()]
    return rows


def loss_row(ranks: int, name: str, one: Ran, ddp: Ran) -> dict[str, Any]:
    """Return the figures of one run, beside ddp's."""
    mine, its = (float(ran.summary["final"]["eval"]["loss"]) for ran in (one, ddp))
    return {
        "ranks_a_box": ranks,
        "strategy": name,
        "step_seconds": one.step_seconds,
        "sent_bytes": one.sent_bytes,
        "fewer_bytes": ddp.sent_bytes / one.sent_bytes,
        "eval_loss": mine,
        "loss_over_ddp": mine / its - 1,
    }


def orders(rows: list[dict[str, Any]]) -> list[tuple[str, list[str], list[str]]]:
    """Return each lab and link in words, and its strategies, the fastest first: as predicted, as measured."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in rows:
        where = f"{one['boxes']} boxes of {one['ranks_a_box']}, {one['mbit_per_second']:g} Mbit/s"
        found.setdefault(where, []).append(one)

    def by(key: str, ones: list[dict[str, Any]]) -> list[str]:
        return [one["strategy"] for one in sorted(ones, key=lambda one: float(one[key]))]

    return [(where, by("predicted_seconds", some), by("step_seconds", some)) for where, some in found.items()]


def speed_table(rows: list[dict[str, Any]]) -> str:
    """Return the speeds as a table of Markdown."""
    lines = [
        "| boxes × ranks | link | strategy | predicted, s a step | measured | ratio | MB between boxes "
        "| largest difference from one device |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        ratio = one["step_seconds"] / one["predicted_seconds"]
        where = f"{one['boxes']} × {one['ranks_a_box']} | {one['mbit_per_second']:g} Mbit/s"
        lines.append(
            f"| {where} | {one['strategy']} | {one['predicted_seconds']:.4f} | {one['step_seconds']:.4f} "
            f"| {ratio:.2f} | {one['sent_bytes'] / 1e6:.1f} | {one['from_single']:.1e} |"
        )
    for where, expected, measured in orders(rows):
        verdict = "as predicted" if expected == measured else f"predicted was {' < '.join(expected)}"
        lines.append(f"\n{where}: {' < '.join(measured)}, {verdict}.")
    return "\n".join(lines)


def loss_table(rows: list[dict[str, Any]]) -> str:
    """Return the losses as a table of Markdown."""
    lines = [
        "| boxes × ranks | strategy | s a step | MB between boxes | ddp ÷ its bytes | validation loss "
        "| against ddp |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        lines.append(
            f"| 2 × {one['ranks_a_box']} | {one['strategy']} | {one['step_seconds']:.4f} "
            f"| {one['sent_bytes'] / 1e6:.1f} | {one['fewer_bytes']:.1f} | {one['eval_loss']:.4f} "
            f"| {one['loss_over_ddp']:+.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--width", type=int, default=1024, help="of the two hidden layers, for speed")
    parser.add_argument("--steps", type=int, default=1500, help="of the language model, for the loss")
    arguments = parser.parse_args()
    why = problem()
    if why is not None:
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {
            "command": " ".join(["python benchmarks/bench_network.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.system()} {platform.machine()}, {platform.python_version()}",
            "speeds": speeds(Path(folder, "speeds"), arguments.width),
        }
        print(speed_table(found["speeds"]), flush=True)
        found["losses"] = losses(Path(folder, "losses"), arguments.steps)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\n{loss_table(found['losses'])}")


if __name__ == "__main__":
    main()

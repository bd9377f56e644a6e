"""What checkpoints cost a training: the same steps with and without them, in turns, in one process.

    python benchmarks/bench_checkpoint.py [--device cpu] [--parameters 100] [--every 50] [--rounds 3]

A GPT of so many millions of parameters is trained with AdamW. Each round takes the same number of steps
three times: without checkpoints, with checkpoints in the background, and with checkpoints that the training
waits for. All of a round's wall clock counts, the end of the last write, too, which half an interval of steps
follows. The figures are the share of the time that checkpoints cost, and what a save's parts take: the copy
into the host's memory, hashing and writing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

from benchlib.runs import planned

from hetexp.checkpoint.folder import SnapshotMemory, TrainingState, packed_whole, write_snapshot
from hetexp.core.config import Config
from hetexp.training.loop import train
from hetexp.training.state import Progress, TrainState
from hetexp.training.wiring import build_state

GOAL_PERCENT = 3.5
TEN_MINUTES = 600.0
"""`trainer.checkpoint_minutes` by default, in seconds."""
WIDTH, VOCABULARY = 768, 8192
WARM_STEPS = 3
KINDS = ("none", "background", "waiting")


def words_of(options: argparse.Namespace) -> list[str]:
    """Return the overrides of the run."""
    # 12 × width² a layer, and the embedding, which is tied to the head.
    layers = max(1, round((options.parameters * 1e6 - VOCABULARY * WIDTH) / (12 * WIDTH**2)))
    return [
        "model=gpt",
        f"model.num_layers={layers}",
        f"model.num_heads={WIDTH // 64}",
        f"model.embedding_size={WIDTH}",
        "model.tie_weights=true",
        "data=synthetic",
        "data.kind=tokens",
        f"data.vocab_size={VOCABULARY}",
        f"data.sequence_length={options.sequence}",
        "data.num_samples=1024",
        "data.num_test_samples=0",
        "optimizer=adamw",
        "strategy=single",
        "balancing=equal",
        f"hardware.devices=[{options.device}]",
        *([f"hardware.threads_per_rank={options.threads}"] if options.threads else []),
        f"trainer.global_batch_size={options.batch}",
        f"trainer.precision={options.precision}",
        "trainer.max_epochs=null",
        "trainer.max_steps=1000000",
        "trainer.log_every=1000000",
        "trainer.keep_last=1",
        "trainer.keep_best=0",
        "logger=none",
        "diagram=false",
    ]


def build(options: argparse.Namespace, place: Path) -> TrainState:
    """Return the objects of the only rank."""
    plan, config = planned(words_of(options), place)
    return build_state(plan, config, 0, dist.HashStore())


def timed(state: TrainState, config: Config, kind: str, every: int, steps: int) -> float:
    """Return the wall clock of so many steps, everything that they started included."""
    changes: dict[str, Any] = {
        "checkpoint_every": every if kind != "none" else 0,
        "checkpoint_in_background": kind == "background",
        "fast_dev_run": 1,  # no checkpoint but where one is due
    }
    state.config = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
    state.total_steps = steps
    state.backend.synchronize()
    began = time.perf_counter()
    train(state, Progress())
    state.backend.synchronize()
    return time.perf_counter() - began


def parts_of_a_save(train_state: TrainState, place: Path, rounds: int) -> dict[str, float]:
    """Return the seconds that the pieces of a save take, with nothing else going on."""
    memory = SnapshotMemory(train_state.backend.lock_pages)
    state = TrainingState(0, {}, {}, {})
    found: dict[str, list[float]] = {}

    def measured(name: str, began: float) -> float:
        now = time.perf_counter()
        found.setdefault(name, []).append(now - began)
        return now

    for number in range(rounds + 1):
        train_state.backend.synchronize()
        began = time.perf_counter()
        snapshot = memory.take(*packed_whole(train_state.model, train_state.optimizer), state)
        asked = measured("snapshot: until training goes on" if number else "first snapshot", began)
        snapshot.arrived()
        measured("snapshot: until it is on the host", began)
        began = time.perf_counter()
        write_snapshot(place, snapshot)
        measured("write: hash, write, fsync", began)
        began = time.perf_counter()
        for tensor in (*snapshot.model.values(), *snapshot.optimizer.values()):
            hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).digest()
        measured("of it: SHA-256", began)
        assert asked >= 0
    size = sum(t.nbytes for t in (*snapshot.model.values(), *snapshot.optimizer.values()))
    return {"bytes": float(size)} | {name: statistics.median(times) for name, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="What checkpoints cost a training.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0 …")
    parser.add_argument("--parameters", type=float, default=100.0, help="millions")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--checkpoints", type=int, default=4, help="a round")
    parser.add_argument("--rounds", type=int, default=3, help="0: only the pieces of a save")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--threads", type=int, help="of a CPU rank")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--folder", type=Path, help="that is written to; by default a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        result = measure(options, Path(place))
    show(result, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Return all figures."""
    state = build(options, place)
    config, kinds = state.config, options.kinds.split(",")
    timed(state, config, "none", 0, WARM_STEPS)
    timed(state, config, "background", 1, 1)  # the memory for snapshots is there afterwards
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    steps = options.checkpoints * options.every + options.every // 2
    for number in range(options.rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            seconds[kind].append(timed(state, config, kind, options.every, steps))
            print(f"round {number + 1}, {kind}: {seconds[kind][-1]:.2f} s", flush=True)
    return {
        "device": str(state.plan.devices[0]),
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "step_seconds": min(seconds["none"]) / steps if options.rounds else 0.0,
        "seconds": seconds,
        "save": parts_of_a_save(state, place / "parts", 3),
    }


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the figures."""
    console = Console()
    size, step = result["save"]["bytes"] / 1e9, 1e3 * result["step_seconds"]
    steps = f", steps of {step:.1f} ms, every {options.every} of them" if options.rounds else ""
    console.print(
        f"{result['device']}: {result['parameters'] / 1e6:.1f} million parameters, "
        f"a checkpoint of {size:.2f} GB{steps}",
        highlight=False,
    )
    table = Table("checkpoints", "seconds, median", "cost, median", "cost of each round", "every 10 minutes")
    without = result["seconds"]["none"]
    for kind, times in result["seconds"].items() if options.rounds else ():
        # Of the time between two checkpoints: a round has half an interval more.
        share = 100 * (options.checkpoints + 0.5) / options.checkpoints
        costs = [share * (one / other - 1) for one, other in zip(times, without, strict=True)]
        rounds = ", ".join(f"{cost:+.1f} %" for cost in costs)
        median = f"{statistics.median(costs):+.1f} %" if kind != "none" else ""
        spent = statistics.median(one - other for one, other in zip(times, without, strict=True))
        seldom = f"{100 * spent / options.checkpoints / TEN_MINUTES:+.3f} %" if kind != "none" else ""
        table.add_row(
            kind, f"{statistics.median(times):.2f}", median, rounds if kind != "none" else "", seldom
        )
    if options.rounds:
        console.print(table, f"The goal is {GOAL_PERCENT} % in the background.")
    table = Table("piece of a save", "ms, median")
    for name, value in result["save"].items():
        if name != "bytes":
            table.add_row(name, f"{1e3 * value:.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

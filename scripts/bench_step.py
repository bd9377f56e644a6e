"""What the host does in a step of hetexp beyond a plain loop, counted without a clock.

    python scripts/bench_step.py [--layers 12]

One CPU rank trains a small GPT with fused AdamW, by `train_step` and by the four lines of a plain loop.
Python calls are what a card waits for where a model is small; each operation is a kernel or less; a read is
where the host waits for the device.
"""

from __future__ import annotations

import collections
import copy
import cProfile
import pstats
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchlib.options import parser_of
from benchlib.runs import planned
from benchlib.tables import table
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hetexp.comm.step_message import StepMessage
from hetexp.data.sampler import Position
from hetexp.training.loop import MetricsWindow
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.state import TrainState
from hetexp.training.wiring import build_state

WARM_STEPS = 2
READ = "aten._local_scalar_dense.default"
"""What `item`, `float` and `bool` of a tensor come to."""


class Operations(TorchDispatchMode):
    """Counts torch's operations by their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[], None]) -> dict[str, int]:
    """Return operations, reads and Python calls of a step."""
    for _ in range(WARM_STEPS):
        step()
    with Operations() as operations:
        step()
    profile = cProfile.Profile()
    profile.runcall(step)
    return {
        "operations": sum(operations.counts.values()),
        "reads": operations.counts[READ],
        "python calls": pstats.Stats(profile).total_calls,  # type: ignore[attr-defined]
    }


def words_of(layers: int) -> list[str]:
    """Return the overrides of the run that is counted."""
    return [
        "model=gpt",
        f"model.num_layers={layers}",
        "model.num_heads=2",
        "model.embedding_size=32",
        "model.tie_weights=true",
        "data=synthetic",
        "data.kind=tokens",
        "data.num_samples=64",
        "data.num_test_samples=0",
        "optimizer.fused=true",
        "strategy=single",
        "balancing=equal",
        "hardware.devices=[cpu]",
        "trainer.global_batch_size=4",
        "trainer.max_epochs=null",
        "trainer.max_steps=10",
        "logger=none",
        "diagram=false",
    ]


def ours(state: TrainState) -> Callable[[], None]:
    """Return a step of hetexp's loop."""
    window = MetricsWindow(state)
    window.restart()
    batches = state.engine.batches(Position(), state.total_steps)
    normalizer = LossNormalizer(StepMessage(state.communicator), 1)

    def step() -> None:
        batch = next(batches)
        window.add(state.engine.step(0, batch, normalizer, window.meter), batch)

    return step


def plain(state: TrainState) -> Callable[[], None]:
    """Return a step of a plain loop with the same model and optimizer; its batch is there already."""
    model = copy.deepcopy(state.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, targets = state.train_data[:4]

    def step() -> None:
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bench(layers: int) -> dict[str, dict[str, int]]:
    """Return what both count."""
    with tempfile.TemporaryDirectory(prefix="bench_step_") as folder:
        plan, config = planned(words_of(layers), Path(folder))
        state = build_state(plan, config, 0, dist.HashStore())
        return {"hetexp": counted(ours(state)), "plain loop": counted(plain(state))}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    found = bench(parser.parse_args().layers)
    names = list(next(iter(found.values())))
    rows = [[name, *(f"{counts[key]:,}" for key in names)] for name, counts in found.items()]
    print(table(["a step of", *names], rows))


if __name__ == "__main__":
    main()

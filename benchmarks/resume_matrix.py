"""Every strategy goes on from every other's checkpoint, on other devices and another number of them.

    python benchmarks/resume_matrix.py [--only ddp,pipeline] [--cuda]

A small GPT is trained for some steps by each layout; each other layout goes on from its checkpoint, and so
does one device. The first loss after the resume must be that of one device (same weights, same samples, same
place in the data), and where the strategy is exact the weights after the last step, too: ≤ 1e-12 in float64.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

from benchlib.runs import start_in
from chaos_lab import checks

STEPS, MORE = 3, 3
LIMIT = 1e-12
COMMON = (
    "data=synthetic",
    "data.num_samples=93",  # batches of 24, and a last one of 21: the resume lies in the midst of an epoch
    "data.num_test_samples=24",
    "data.kind=tokens",
    "data.mask_fraction=0.6",
    "model=gpt",
    "model.num_layers=3",
    "model.num_heads=2",
    "model.embedding_size=16",
    "model.tie_weights=true",
    "optimizer=adamw",
    "trainer.schedule=cosine",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=24",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "launch.start_method=forkserver",
    "hardware.threads_per_rank=1",
    "logger=none",
    "diagram=false",
)


@dataclass(frozen=True)
class Layout:
    """Devices and a strategy."""

    options: tuple[str, ...]
    exact: bool = True
    """Whether it takes one device's steps."""
    same_samples: bool = True
    """Whether a step has one device's samples, and its first loss is therefore the same."""


def _cpus(count: int) -> str:
    return f"hardware.devices=[{','.join(['cpu'] * count)}]"


def _cards(*names: str) -> tuple[str, str]:
    """Emulated, and of those that have float64: Intel's have not."""
    return "hardware=mix", f"hardware.cards=[{','.join(names)}]"


LAYOUTS = {
    "single": Layout(("hardware=cpu", "strategy=single")),
    "ddp, 2": Layout((_cpus(2), "strategy=ddp", "balancing=equal")),
    "ddp, 3": Layout((_cpus(3), "strategy=ddp", "balancing=manual", "balancing.weights=[3,0,1]")),
    "nvidia + amd": Layout((*_cards("rtx_3090", "mi250"), "strategy=ddp", "balancing=equal")),
    "amd + nvidia": Layout((*_cards("mi250", "rtx_3090"), "strategy=ddp", "balancing=equal")),
    "pipeline, 2": Layout((_cpus(2), "strategy=pipeline", "strategy.shard_plan=[[0,1],[1,3]]")),
    "pipeline, 3": Layout((_cpus(3), "strategy=pipeline", "strategy.shard_plan=[[0,1],[1,2],[2,3]]")),
    "hybrid, 3": Layout(
        (
            _cpus(3),
            "strategy=hybrid",
            "strategy.groups=[[0,1],[2]]",
            "strategy.shard_plan=[[[0,2],[2,3]],[[0,3]]]",
        )
    ),
    "local_sgd, 2": Layout(
        (_cpus(2), "strategy=local_sgd", "strategy.sync_every=1", "balancing=equal"), exact=False
    ),
    "independent, 2": Layout(
        (_cpus(2), "strategy=independent", "balancing=equal"), exact=False, same_samples=False
    ),
}
CUDA = {
    "cuda": Layout(("hardware.devices=[cuda:0]", "strategy=single")),
    "cuda + cpu": Layout(("hardware.devices=[cuda:0,cpu]", "strategy=ddp", "balancing=equal")),
}


@dataclass(frozen=True)
class Trained:
    """What a run left."""

    folder: Path
    losses: list[float]
    """Of each step, in order."""

    def weights(self, step: int | None = None) -> dict[str, np.ndarray]:
        """Return those of a checkpoint, by default of the newest."""
        there = (self.folder / "checkpoints").glob("step_*" if step is None else f"step_{step:08d}")
        return dict(load_file(max(there) / "model.safetensors"))


def train(folder: Path, layout: Layout, steps: int, resume: Path | None = None) -> Trained:
    """Train to a step, in this process, and return what came of it."""
    words = [*COMMON, *layout.options, f"trainer.max_steps={steps}"]
    words += [f"resume='{resume}'"] if resume is not None else []
    return Trained(folder, [row["train/loss"] for row in start_in(folder, words).rows])


def difference(one: Trained, other: Trained, step: int | None = None) -> float:
    """Return ‖Δθ‖₂ / ‖θ‖₂ over all weights, of a step of both or of their last ones."""
    return checks.difference(one.weights(step), other.weights(step))


def verdict(layout: Layout, found: Trained, alone: Trained) -> tuple[str, bool]:
    """Return what came of a resume, in a few characters, and whether it is right.

    Args:
        alone: one device that went on from the same checkpoint.
    """
    if len(found.losses) != len(alone.losses):
        return f"{len(found.losses)} steps", False
    first = abs(found.losses[0] - alone.losses[0]) / abs(alone.losses[0])
    if layout.exact:
        worst = max(first, difference(found, alone))
        return f"{worst:.0e}", worst <= LIMIT
    if layout.same_samples:
        return f"loss {first:.0e}", first <= LIMIT
    return "goes on", all(loss == loss for loss in found.losses)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and return 1 where a resume is not what it must be."""
    parser = argparse.ArgumentParser(description="Resume every strategy's checkpoint by every other.")
    parser.add_argument("--only", help="these layouts, separated by semicolons")
    parser.add_argument("--cuda", action="store_true", help="with a CUDA card, too")
    options = parser.parse_args(arguments)
    layouts = LAYOUTS | (CUDA if options.cuda else {})
    names = options.only.split(";") if options.only else list(layouts)
    table = Table("saved by ╲ loaded by", *names)
    wrong = []
    with tempfile.TemporaryDirectory() as place:
        for saver in names:
            saved = train(Path(place, saver), layouts[saver], STEPS)
            alone = train(Path(place, f"{saver}, alone"), LAYOUTS["single"], STEPS + MORE, saved.folder)
            row = []
            for loader in names:
                layout = layouts[loader]
                found = train(Path(place, f"{saver} to {loader}"), layout, STEPS + MORE, saved.folder)
                answer, right = verdict(layout, found, alone)
                row.append(answer if right else f"[red]{answer}[/]")
                if not right:
                    wrong.append(f"{saver} → {loader}: {answer}")
            table.add_row(saver, *row)
            print(f"{saver}: {', '.join(row)}", flush=True)
    Console(width=200).print(table)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""What loading samples takes of a step, for each shipped model with data that suits it, on one device.

    python benchmarks/bench_input.py [--device cuda:0] [--steps 200] [--rounds 5] [--batch 64] [--threads 1]

Three ways in turn, in one process a workload, the loop as it trains: samples asked for one by one and
collated in the step, as torch's `DataLoader` does without processes; whole microbatches in the step; whole
microbatches by a thread beside it, as shipped. The last two use page-locked memory where the device copies
from it. Of each way the round with the quickest steps, which other processes disturbed least; the steps
before the first log line are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

from benchlib.options import parser_of
from benchlib.tables import row as line
from benchlib.tables import table

WORKLOADS = {
    "digits, mlp": ("data=digits", "model=mlp"),
    "digits, convnet": ("data=digits", "model=convnet"),
    "text, gpt": ("data=text", "model=gpt"),
    "synthetic, mlp": ("data=synthetic", "model=mlp"),
    "synthetic images, convnet": ("data=synthetic", "data.input_shape=[3,32,32]", "model=convnet"),
    "synthetic tokens, gpt": ("data=synthetic", "data.kind=tokens", "data.sequence_length=128", "model=gpt"),
}
WAYS = ("one by one", "in the step", "thread")


class OneByOne:
    """A data set that gives one sample at a time, as most of people's own do."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


@contextmanager
def loading(parts: Any, way: str) -> Iterator[None]:
    """Let the loop load its samples in one of the ways."""
    from hetexp.data.loader import local_batches as own

    options: dict[str, Any] = {} if way == "thread" else {"threaded": False}
    if way == "one by one":
        parts.train_data = OneByOne(parts.train_data)
        options["page_locked"] = False

    def local_batches(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{**kwargs, **options})

    with patch("hetexp.training.replica.local_batches", local_batches):
        yield


def measure(name: str, options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return seconds of data and of the whole step, of each round, by the way of loading."""
    from benchlib.runs import planned

    from hetexp.hardware.backend import backend_class

    words = [
        *WORKLOADS[name],
        f"hardware.devices=[{options.device}]",
        "strategy=single",
        "balancing=equal",
        "logger=none",
        f"trainer.global_batch_size={options.batch}",
        f"trainer.fast_dev_run={options.steps}",
        f"trainer.log_every={max(1, options.steps // 10)}",
        *([f"hardware.threads_per_rank={options.threads}"] if options.threads else []),
    ]
    with tempfile.TemporaryDirectory() as folder:
        plan, config = planned(words, Path(folder))
        spec = plan.devices[0]
        os.environ.update(backend_class(spec.backend).environment(spec))  # before torch looks for cards

        import torch.distributed as dist

        from hetexp.training.loop import train
        from hetexp.training.state import Progress
        from hetexp.training.wiring import build_state

        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                parts = build_state(plan, config, 0, dist.HashStore())
                with loading(parts, way):
                    totals = train(parts, Progress()).totals
                assert totals.start is not None
                steps = totals.steps - totals.start.steps
                settled = totals.after_warmup
                found[way].append((settled.data_seconds / steps, settled.train_seconds / steps))
        return found


def row(name: str, found: dict[str, list[tuple[float, float]]]) -> str:
    """Return a line of the table: microseconds of data, of a step, and the one as a share of the other."""
    cells = [name]
    for way in WAYS:
        data, step = min(found[way], key=lambda round_: round_[1])
        cells += [f"{1e6 * data:,.0f}", f"{1e6 * step:,.0f}", f"{data / step:.1%}"]
    return line(cells)


def main() -> None:
    """Measure each workload in a process of its own, and print a Markdown table."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--threads", type=int, help="of torch; by default as a run has them")
    parser.add_argument("--only", choices=WORKLOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(measure(options.only, options)))
        return
    head = [title for way in WAYS for title in (f"{way}: data, µs", "step, µs", "data")]
    print(table([f"{options.device}, batch {options.batch}", *head], []))
    for name in WORKLOADS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(row(name, json.loads(answer.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()

"""Runs of hetexp and of the plain script, and what is kept of them; plain types, for the JSON file."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.runs import planned, start_in, start_ranks

from ddp_bench.task import LEARNING_RATE, TASKS, Task, words_of
from ddp_bench.watch import Watch, rows_of
from hetexp.hardware.backend import environment_together

PLAIN = Path(__file__).resolve().parent.parent / "models_bench" / "loops.py"


@dataclass(frozen=True)
class Job:
    """What is trained, on how many devices, for how long."""

    task: Task
    devices: tuple[str, ...]
    """As `hardware.devices` has them: `cuda:0`, `cpu`."""
    local_batch_size: int
    """Samples of a step on each of them."""
    warm_steps: int
    """Left out of every figure: libraries load, kernels are chosen, caches fill."""
    steps: int
    """Measured after them."""
    log_every: int
    precision: str = "bfloat16"
    start_method: str = "subprocess"

    @property
    def all_steps(self) -> int:
        return self.warm_steps + self.steps

    @property
    def global_batch_size(self) -> int:
        return self.local_batch_size * len(self.devices)

    def facts(self) -> dict[str, Any]:
        """Return what a page says of the job."""
        return {
            "parameters": self.task.num_parameters(),
            "sample": self.task.sample(),
            "local_batch": self.local_batch_size,
            "precision": self.precision,
            "warm_steps": self.warm_steps,
            "steps": self.steps,
        }

    def words(self) -> list[str]:
        """Return the overrides of a run of hetexp."""
        return [
            *words_of(self.task, self.global_batch_size, self.all_steps, self.precision),
            f"hardware.devices=[{','.join(self.devices)}]",
            "balancing=equal",
            f"strategy={'ddp' if len(self.devices) > 1 else 'single'}",
            f"trainer.log_every={self.log_every}",
            f"launch.start_method={self.start_method}",
        ]


def ours(folder: Path, words: Sequence[str], warm_steps: int, tokens_per_sample: int) -> dict[str, Any]:
    """Run hetexp in a new folder, and return what `measured` makes of it, with its losses and summary."""
    folder = Path(tempfile.mkdtemp(dir=folder)) / "run"
    with Watch(folder / "metrics.jsonl", planned(words)[0].devices) as watch:
        run = start_in(folder, words)
    rows, summary = run.rows, run.summary
    found = measured(rows, warm_steps, summary["global_batch"], tokens_per_sample)
    return found | {
        "peak_memory_bytes": [device["peak_memory"] for device in summary["devices"]],
        "utilisation": watch.busy(warm_steps, rows[-1]["step"]),
        "losses": [row["train/loss"] for row in rows],
        "eval_loss": (summary["final"]["eval"] or {}).get("loss"),
        "comm": summary["comm"],
        "devices": [device["name"] for device in summary["devices"]],
        "local_batches": [device["local_batch"] for device in summary["devices"]],
        "torch": summary["versions"]["torch"],
    }


def plain(folder: Path, job: Job) -> dict[str, Any]:
    """Run the plain script on the devices that hetexp would take, and return the same of it."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    devices = planned(job.words())[0].devices
    on_card = devices[0].backend == "cuda"
    described = {
        "model": job.task.model_name,
        "tiny": job.task == TASKS[job.task.model_name][True],
        "on_card": on_card,
        "num_cards": len(devices),
        "world_size": len(devices),
        "local_batch": job.local_batch_size,
        "workers": 2 if on_card else 0,
        "compiled": False,
        "precision": job.precision,
        "steps": job.all_steps,
        "log_every": job.log_every,
        "folder": str(folder),
        "learning_rate": LEARNING_RATE,
    }
    command = [str(PLAIN), "plain", json.dumps(described)]
    with Watch(folder / "metrics.jsonl", devices) as watch:
        start_ranks(command, len(devices), {}, environment_together(devices) if on_card else None)
    rows = rows_of(folder / "metrics.jsonl")
    found = measured(rows, job.warm_steps, job.global_batch_size, job.task.tokens_per_sample)
    ranks = [json.loads((folder / f"rank_{rank}.json").read_text("utf-8")) for rank in range(len(devices))]
    return found | {
        "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in ranks],
        "utilisation": watch.busy(job.warm_steps, rows[-1]["step"]),
        "losses": [row["train/loss"] for row in rows],
        "devices": [device.name for device in devices],
        "torch": ranks[0]["torch"],
    }


def measured(
    rows: Sequence[dict[str, Any]], warm_steps: int, global_batch_size: int, tokens_per_sample: int
) -> dict[str, Any]:
    """Return the speed of a run: of its log lines after the warm steps, the median."""
    seconds = statistics.median(row["step_seconds"] for row in rows if row["step"] > warm_steps)
    speed = global_batch_size / seconds
    return {
        "step_s": seconds,
        "samples_per_s": speed,
        "tokens_per_s": speed * tokens_per_sample,
        "global_batch": global_batch_size,
    }

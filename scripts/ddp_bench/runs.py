"""Runs of hetexp and of the plain script, and what is kept of them; plain types, for the JSON file."""

from __future__ import annotations

import io
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balance_bench.runs import start_ranks
from rich.console import Console

from ddp_bench.task import LEARNING_RATE, Task, data_of, words_of
from ddp_bench.watch import Watch, rows_of
from hetexp.app import check, compose_config, run
from hetexp.core.device import DeviceSpec
from hetexp.hardware.backend import environment_together
from hetexp.plan.run_spec import Request

PLAIN = Path(__file__).resolve().parent.parent / "rivals" / "plain_torch.py"


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


def devices_of(words: Sequence[str]) -> list[DeviceSpec]:
    """Return the devices that a run of these overrides would take.

    Raises:
        ConfigError: it would not start.
    """
    found = check(compose_config(words), Request(Path("unused"), Path.cwd()))
    return list(found.accepted().selection.devices)


def ours(folder: Path, words: Sequence[str], warm_steps: int, tokens_per_sample: int) -> dict[str, Any]:
    """Run hetexp in a new folder, and return what `measured` makes of it, with its losses and summary."""
    folder = Path(tempfile.mkdtemp(dir=folder)) / "run"
    console = Console(file=io.StringIO(), width=200)
    metrics = folder / "metrics.jsonl"
    with Watch(metrics, devices_of(words)) as watch:
        summary = run(compose_config(words), Request(folder, Path.cwd(), overrides=tuple(words)), console)
    rows = rows_of(metrics)
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
    devices = devices_of(job.words())
    on_card = devices[0].backend == "cuda"
    command = [
        str(PLAIN),
        f"--folder={folder}",
        f"--kind={job.task.model_name}",
        f"--model={json.dumps(job.task.model())}",
        f"--data={json.dumps(data_of(job.task, job.global_batch_size, job.all_steps))}",
        f"--local-batch-size={job.local_batch_size}",
        f"--steps={job.all_steps}",
        f"--log-every={job.log_every}",
        f"--learning-rate={LEARNING_RATE}",
        f"--precision={job.precision}",
        f"--device={'cuda' if on_card else 'cpu'}",
        f"--workers={2 if on_card else 0}",
    ]
    with Watch(folder / "metrics.jsonl", devices) as watch:
        start_ranks(command, len(devices), {}, environment_together(devices) if on_card else None)
    rows = rows_of(folder / "metrics.jsonl")
    found = measured(rows, job.warm_steps, job.global_batch_size, job.task.tokens_per_sample)
    told = [json.loads((folder / f"rank_{rank}.json").read_text("utf-8")) for rank in range(len(devices))]
    return found | {
        "peak_memory_bytes": [one["peak_memory_bytes"] for one in told],
        "utilisation": watch.busy(job.warm_steps, rows[-1]["step"]),
        "losses": [row["train/loss"] for row in rows],
        "devices": [device.name for device in devices],
        "torch": told[0]["torch"],
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


def median_of(runs: Sequence[dict[str, Any]], key: str) -> float | None:
    """Return the median over runs of a figure, of a list its largest; `None` where a run does not tell it."""
    values = [run.get(key) for run in runs]
    flat = [
        max(value, default=None) if isinstance(value, list) and None not in value else value
        for value in values
    ]
    told = [value for value in flat if isinstance(value, (int, float))]
    return statistics.median(told) if told and len(told) == len(runs) else None

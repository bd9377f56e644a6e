"""One training, written for plain torch, for Accelerate and for hetexp, each as its experts write it.

All three use the same model, data, fused AdamW and batches, page-locked copies that the host does not wait
for, and processes that load. Every line of metrics waits for the device. This file is the script of
`hetexp launch` and of the ranks of `scripts/bench_ddp.py`; else the other two loops run in forked ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, default_collate

from models_bench.tasks import TASKS, Task, data_of, model_of


@dataclass(frozen=True)
class Job:
    """One measurement."""

    model: str
    tiny: bool
    on_card: bool
    num_cards: int
    """Cards of the machine that the ranks share."""
    world_size: int
    local_batch: int
    workers: int
    compiled: bool
    precision: str
    steps: int
    log_every: int
    folder: str
    learning_rate: float = 1e-4
    first_card: int = 0
    """Number of the card of rank 0."""

    @property
    def task(self) -> Task:
        return TASKS[self.model]

    @property
    def global_batch(self) -> int:
        return self.local_batch * self.world_size

    @property
    def num_samples(self) -> int:
        """Samples of the data set, all of which one epoch takes."""
        return self.global_batch * self.steps

    def card(self, rank: int) -> int:
        """Return the number of a rank's card."""
        return (self.first_card + rank) % self.num_cards

    def written(self) -> str:
        return json.dumps(asdict(self))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, fused=True)

    def loader(self, data: Any, sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            data,
            batch_size=self.local_batch,
            sampler=sampler,
            drop_last=True,
            num_workers=self.workers,
            # torch's own default, which the fork server that made this rank has changed.
            multiprocessing_context="fork" if self.workers else None,
            persistent_workers=self.workers > 0,
            pin_memory=self.on_card,
            collate_fn=self.task.collate or default_collate,
        )

    def in_sync(self, model: nn.Module) -> nn.Module:
        """Return the model, with torch's synchronised BatchNorm if the task asks for it on cards."""
        if self.task.sync_batch_norm and self.world_size > 1 and self.on_card:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model


class Lines:
    """Writes the seconds of a step into `metrics.jsonl`, as hetexp does."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank, self._step = job, rank, 0
        self._file = Path(job.folder, "metrics.jsonl")
        self._began = time.perf_counter()

    def step(self, loss: torch.Tensor) -> None:
        """Count a step, and write a line if one is due; that waits for the device."""
        self._step += 1
        if self._step % self._job.log_every:
            return
        mean, now = float(loss), time.perf_counter()
        line = {
            "step": self._step,
            "train/loss": mean,
            "step_seconds": (now - self._began) / self._job.log_every,
        }
        if self._rank == 0:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._began = time.perf_counter()

    def close(self) -> None:
        """Write this rank's peak of memory."""
        if self._job.on_card:
            peak = torch.cuda.max_memory_allocated()
        else:
            import resource

            factor = 1 if sys.platform == "darwin" else 1024
            peak = factor * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        facts = {"peak_memory_bytes": peak, "torch": torch.__version__}
        Path(self._job.folder, f"rank_{self._rank}.json").write_text(json.dumps(facts), encoding="utf-8")


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch on the device."""
    if isinstance(batch, dict):
        return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
    return [value.to(device, non_blocking=True) for value in batch]


def plain(job: Job, rank: int) -> None:
    """Train with torch alone, by `DistributedDataParallel` if there are several ranks."""
    device = torch.device("cuda", job.card(rank)) if job.on_card else torch.device("cpu")
    if job.on_card:
        torch.cuda.set_device(device)
    data = data_of(job.model, job.tiny, job.num_samples)
    model: nn.Module = job.in_sync(model_of(job.model, job.tiny)).to(device)
    optimizer = job.optimizer(model)
    sampler: Any = RandomSampler(data)
    if job.world_size > 1:
        own_card = job.on_card and job.num_cards >= job.world_size
        backend = "nccl" if own_card else "gloo"
        torch.distributed.init_process_group(backend, device_id=device if own_card else None)
        sampler = DistributedSampler(data, seed=0)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if job.compiled:
        model = torch.compile(model)  # type: ignore[assignment]
    half = job.precision == "bfloat16"
    model.train()
    lines = Lines(job, rank)
    for batch in job.loader(data, sampler):
        with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            loss = job.task.loss(model, moved(batch, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        lines.step(loss.detach())
    lines.close()


def with_accelerate(job: Job, rank: int) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs

    if job.on_card:
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"cuda:{job.card(rank)}"
    accelerator = Accelerator(
        cpu=not job.on_card,
        mixed_precision="bf16" if job.precision == "bfloat16" else "no",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    data = data_of(job.model, job.tiny, job.num_samples)
    model = job.in_sync(model_of(job.model, job.tiny))
    optimizer = job.optimizer(model)
    if job.compiled:
        model = torch.compile(model)  # type: ignore[assignment]
    model, optimizer, loader = accelerator.prepare(model, optimizer, job.loader(data, RandomSampler(data)))
    model.train()
    lines = Lines(job, rank)
    for batch in loader:
        loss = job.task.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        lines.step(loss.detach())
    lines.close()


def with_hetexp(job: Job) -> None:
    """Train with `hetexp.setup`."""
    import hetexp

    data = data_of(job.model, job.tiny, job.num_samples)
    model = model_of(job.model, job.tiny)
    optimizer = job.optimizer(model)
    if job.compiled:
        model.compile()
    run = hetexp.setup(
        model,
        optimizer,
        data,
        global_batch_size=job.global_batch,
        num_workers=job.workers,
        collate=job.task.collate or default_collate,
        log_every=job.log_every,
    )
    run.model.train()
    for batch in run.batches():
        loss = job.task.loss(run.model, batch)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


LOOPS: dict[str, Callable[[Job, int], None]] = {"plain": plain, "accelerate": with_accelerate}


def run_rank(way: str, text: str, rank: int, threads: int, port: int) -> None:
    """Be a rank of one of `LOOPS`, forked from multiprocessing's fork server."""
    job = Job(**json.loads(text))
    log = os.open(Path(job.folder, f"rank_{rank}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job.world_size > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    if threads:
        torch.set_num_threads(threads)
    LOOPS[way](job, rank)
    os._exit(0)  # as hetexp's ranks end: taking gloo's threads down can wait for ever


if __name__ == "__main__":
    chosen, described = sys.argv[1], Job(**json.loads(sys.argv[2]))
    if chosen == "hetexp":
        with_hetexp(described)
    else:  # a rank as torchrun would start it
        LOOPS[chosen](described, int(os.environ["RANK"]))
        os._exit(0)

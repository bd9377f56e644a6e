"""A GPT or a conv net trained by DistributedDataParallel alone, as a person who knows torch well writes it.

Started by `scripts/bench_ddp.py` as torchrun would. bfloat16 by autocast, fused AdamW, gradients that are
views of the buckets, pinned batches loaded ahead; nothing waits for the device but the log line. The model is
a plain `torch.nn.Module`, the data a plain `Dataset`: hetexp's own classes, so that both compute the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hetexp.data.synthetic import Synthetic
from hetexp.model.convnet import ConvNet
from hetexp.model.gpt import GPT


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where metrics and memory are written")
    parser.add_argument("--kind", choices=["gpt", "convnet"], required=True)
    parser.add_argument("--model", type=json.loads, required=True)
    parser.add_argument("--data", type=json.loads, required=True)
    parser.add_argument("--local-batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log-every", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    on_card = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_card else "gloo", device_id=device if on_card else None)
    rank = dist.get_rank()

    torch.manual_seed(0)
    data = Synthetic(**arguments.data)
    model = (GPT if arguments.kind == "gpt" else ConvNet)(**arguments.model, **data.facts)
    ddp = DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=arguments.learning_rate, fused=on_card or None)
    sampler: DistributedSampler[Any] = DistributedSampler(data.train, seed=0)
    loader: DataLoader[Any] = DataLoader(
        data.train,
        batch_size=arguments.local_batch_size,
        sampler=sampler,
        drop_last=True,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        pin_memory=on_card,
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bfloat16")
    metrics = (arguments.folder / "metrics.jsonl").open("w", encoding="utf-8") if rank == 0 else None

    ddp.train()
    began = time.perf_counter()
    for step, (inputs, targets) in enumerate(batches(loader, sampler, arguments.steps), start=1):
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        with autocast:
            logits = ddp(inputs)
            loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % arguments.log_every == 0:
            mean = float(loss)  # rank 0's own; it waits for the device
            if on_card:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if metrics is not None:
                line = {"step": step, "train/loss": mean, "step_seconds": (now - began) / arguments.log_every}
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
            began = now

    facts = {"peak_memory_bytes": peak_memory_bytes(on_card), "torch": torch.__version__}
    (arguments.folder / f"rank_{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    del loader  # and with it the processes that load
    dist.barrier()
    os._exit(0)  # as hetexp's ranks end: taking gloo's threads down can wait for ever


def batches(loader: DataLoader[Any], sampler: DistributedSampler[Any], steps: int) -> Iterator[Any]:
    """Yield so many batches, epoch after epoch."""
    done, epoch = 0, 0
    while True:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return
        epoch += 1


def peak_memory_bytes(on_card: bool) -> int:
    """Return the most memory that tensors have held on the card, or this process on the host."""
    if on_card:
        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()

"""A step with BatchNorm over all ranks: `strategy=ddp` beside DDP with torch's SyncBatchNorm, and without.

    python scripts/bench_batch_norm.py [--device cuda] [--model resnet50] [--rounds 3] [--json norm.json]

The model is timm's. All ways take turns within one run, on the same devices and the same batches, which are
copied from page-locked memory. A speed is the median over the rounds. torch's SyncBatchNorm refuses the CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from benchlib import tables
from benchlib.options import parser_of
from benchlib.runs import free_port, keep
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hetexp.comm.communicator import ProcessGroupCommunicator
from hetexp.comm.connections.pulse import Pulse
from hetexp.comm.shared_memory.exchange import SharedMemoryExchange
from hetexp.strategy.ddp import DDP

ENOUGH = 0.98
"""Least part of torch's speed, below which a profile is printed."""
CLASSES = 1000

Step = Callable[[], None]


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    port = free_port()
    context = torch.multiprocessing.get_context("spawn")
    pipe, other = context.Pipe(duplex=False)
    processes = [
        context.Process(target=rank_main, args=(rank, port, arguments, other if rank == 0 else None))
        for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    other.close()
    try:
        found = pipe.recv()
    except EOFError:
        found = None
    for process in processes:
        process.join()
    if found is None or any(process.exitcode for process in processes):
        sys.exit("a rank failed")
    print(f"\n{table(found)}")
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    facts = {"torch": torch.__version__, "cores": os.cpu_count(), "card": card}
    keep(arguments.json, facts | {"model": arguments.model, "samples_per_s": found})


def rank_main(rank: int, port: int, arguments: argparse.Namespace, pipe: Any) -> None:
    """Measure as one rank; the first rank sends the speeds."""
    device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // arguments.ranks)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("g", store),
        rank=rank,
        world_size=arguments.ranks,
        timeout=timedelta(seconds=120),
    )
    communicator = ProcessGroupCommunicator(
        device, Pulse(dist.PrefixStore("p", store), rank, arguments.ranks, 120.0)
    )
    if device.type == "cpu":  # as `hetexp.training.group.connect` does on one host
        communicator.form_rows = lambda name: SharedMemoryExchange.form(
            dist.PrefixStore(name, store), rank, arguments.ranks, 120.0, device, small=True
        )
    steps = {name: step_of(name, device, communicator, arguments) for name in ways_of(device)}
    took: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds + 1):  # the first warms up
        for name, step in steps.items():
            took[name].append(seconds_of(step, arguments.steps, device))
            if rank == 0 and number:
                print(
                    f"round {number}, {name}: {speed(took[name][-1], arguments):,.1f} samples/s", flush=True
                )
    found = {
        name: [round(speed(seconds, arguments), 2) for seconds in sorted(values[1:])]
        for name, values in took.items()
    }
    profiled = [name for name in ("torch", "hetexp") if name in steps]
    if arguments.profile or ratio(found, "torch") < ENOUGH:
        for name in profiled:
            profile(name, steps[name], rank, device)
    dist.barrier()
    if pipe is not None:
        pipe.send(found)
        pipe.close()
    os._exit(0)


def ways_of(device: torch.device) -> list[str]:
    """Return what is measured."""
    return ["torch", "hetexp", "local"] if device.type == "cuda" else ["hetexp", "local"]


def step_of(
    name: str, device: torch.device, communicator: ProcessGroupCommunicator, arguments: argparse.Namespace
) -> Step:
    """Return a step of `torch` (SyncBatchNorm), of `hetexp`, or with `local` statistics."""
    module = module_of(name, device, communicator, arguments)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    order = torch.channels_last if arguments.channels_last else torch.contiguous_format
    shape = (arguments.batch, 3, arguments.pixels, arguments.pixels)
    images = torch.randn(shape).to(memory_format=order)
    labels = torch.randint(CLASSES, (arguments.batch,))
    if device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()

    def step() -> None:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in (images, labels))
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bfloat16"):
            loss = functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def module_of(
    name: str, device: torch.device, communicator: ProcessGroupCommunicator, arguments: argparse.Namespace
) -> nn.Module:
    """Return the wrapped model."""
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(arguments.model, num_classes=CLASSES).to(device)
    if arguments.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if name == "torch":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    inner: Any = torch.compile(model) if arguments.compile else model
    if name != "hetexp":
        return DistributedDataParallel(inner, gradient_as_bucket_view=True)
    strategy = DDP()
    module = strategy.wrap(inner, device)
    few = torch.randn(2, 3, arguments.pixels, arguments.pixels, device=device)
    strategy.attach_group(module, communicator, few, nullcontext)
    return module


def seconds_of(step: Step, steps: int, device: torch.device) -> float:
    """Return the seconds of a step, of the slowest rank."""
    settle: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    step()
    settle()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    settle()
    seconds = torch.tensor([(time.perf_counter() - began) / steps], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def profile(name: str, step: Step, rank: int, device: torch.device) -> None:
    """Print which operations take the time of three steps, on rank 0."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if rank == 0:
        orders = ["self_cpu_time_total"] + (["self_device_time_total"] if device.type == "cuda" else [])
        for order in orders:
            print(f"\n{name}, three steps, by {order}")
            averages = profiler.key_averages()
            print(averages.table(sort_by=order, row_limit=30, max_name_column_width=60), flush=True)


def speed(seconds: float, arguments: argparse.Namespace) -> float:
    """Return the samples a second of all ranks."""
    return float(arguments.batch * arguments.ranks / seconds)


def ratio(found: dict[str, list[float]], other: str) -> float:
    """Return hetexp's median speed, relative to another's; 1 if that was not measured."""
    if other not in found:
        return 1.0
    return statistics.median(found["hetexp"]) / statistics.median(found[other])


def table(found: dict[str, list[float]]) -> str:
    """Return a Markdown table of the speeds."""
    titles = {"torch": "DDP, SyncBatchNorm", "hetexp": "`strategy=ddp`", "local": "DDP, own statistics"}
    rows = [
        [titles[name], f"{statistics.median(values):,.1f}", f"{min(values):,.1f}–{max(values):,.1f}"]
        + [f"{ratio(found, name):.3f}"]
        for name, values in found.items()
    ]
    return tables.table(["", "samples/s", "min–max", "hetexp ÷"], rows)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", "--gpus", dest="ranks", type=int, default=2)
    parser.add_argument("--model", default="resnet50", help="of timm")
    parser.add_argument("--batch", type=int, default=128, help="samples of a step on each device")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also if hetexp is not slower")
    parser.add_argument("--json", type=Path, help="where to put the figures")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()

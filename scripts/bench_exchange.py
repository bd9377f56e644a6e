"""gloo against shared memory against the vendor's own library: one all-reduce, by size, ranks and devices.

    python scripts/bench_exchange.py [--device cuda] [--ranks 2,3,4] [--json exchange.json]

All ways take turns within one run, on the same tensors. A time is from all ranks' being ready to the last
rank's having the result on its device. Of a small tensor it is a part of a row of sums, one after another:
ranks leave a barrier at moments that differ by more than such a sum takes. Ranks share the cards that are
there, one after another. Each result is compared bit by bit between ranks, and with a sum in float64.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from benchlib import tables
from benchlib.options import numbers, parser_of
from benchlib.runs import free_port, keep

from hetexp.comm.exchange import Exchange, GroupExchange
from hetexp.comm.shared_memory import exchange as shared_memory
from hetexp.comm.shared_memory.exchange import SharedMemoryExchange

SIZES = (*(2**n for n in range(6, 16, 2)), *(2**n for n in range(16, 29)))
"""64 B to 256 MiB."""
SMALL_BYTES, IN_A_ROW = 2**16, 20
"""Tensors up to this size are summed so many times in a row. Sums of four ranks then stay finite."""
ROUNDING = 2.0**-23
"""Of float32: what two numbers that are added may be off by, relative to the sum of their magnitudes."""


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    found = []
    for ranks in arguments.ranks:
        kinds = kinds_of(arguments.device, ranks)
        rows = measure(kinds, arguments)
        found += rows
        print(f"\n{' + '.join(kinds)}\n\n{table(rows)}", flush=True)
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    facts = {"torch": torch.__version__, "cores": os.cpu_count(), "card": card}
    keep(arguments.json, facts | {"rows": found})
    if any(row["wrong"] for row in found):
        sys.exit("a result was wrong")


def kinds_of(device: str, ranks: int) -> tuple[str, ...]:
    """Return the kind of device of each rank: all alike or, of `mixed`, cards and one CPU."""
    return ("cuda",) * (ranks - 1) + ("cpu",) if device == "mixed" else (device,) * ranks


def measure(kinds: tuple[str, ...], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row a size."""
    port = free_port()
    context = torch.multiprocessing.get_context("spawn")
    pipe, other = context.Pipe(duplex=False)
    processes = [
        context.Process(target=rank_main, args=(rank, kinds, port, arguments, other if rank == 0 else None))
        for rank in range(len(kinds))
    ]
    for process in processes:
        process.start()
    other.close()
    rows: list[dict[str, Any]] = []
    try:
        while True:
            rows.append(pipe.recv())
    except EOFError:
        pass
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a rank failed")
    return rows


def rank_main(rank: int, kinds: tuple[str, ...], port: int, arguments: argparse.Namespace, pipe: Any) -> None:
    """Measure as one rank; the first rank sends the rows."""
    size = len(kinds)
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // size)))
    if arguments.chunk_kib:
        shared_memory.CHUNK_BYTES = shared_memory.HOST_CHUNK_BYTES = arguments.chunk_kib * 1024
    device = torch.device(kinds[rank])
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    limit = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("g", store), rank=rank, world_size=size, timeout=limit
    )
    ways: dict[str, Exchange] = {
        "gloo": GroupExchange(),
        "shm": SharedMemoryExchange.form(dist.PrefixStore("s", store), rank, size, 120.0, device),
    }
    if all(kind == "cuda" for kind in kinds) and torch.cuda.device_count() >= size:
        ways["native"] = GroupExchange(dist.new_group(backend="nccl"))
    for num_bytes in arguments.sizes:
        row = one_size(num_bytes, rank, device, ways, arguments.seconds)
        if pipe is not None:
            pipe.send({"kinds": kinds, "bytes": num_bytes, **row})
    dist.barrier()
    ways["shm"].close()
    if pipe is not None:
        pipe.close()
    os._exit(0)


def one_size(
    num_bytes: int, rank: int, device: torch.device, ways: dict[str, Exchange], seconds_a_way: float
) -> dict[str, Any]:
    """Return each way's median of seconds, and which results were wrong."""
    settle: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    generator = torch.Generator().manual_seed(1000 + rank)
    own = torch.randn(num_bytes // 4, generator=generator)
    true, spread = own.double(), own.double().abs()
    dist.all_reduce(true)
    dist.all_reduce(spread)
    wrong = []
    for name, way in ways.items():
        result = own.to(device, copy=True)
        way.sum_(result)
        here = result.cpu()
        near = bool(((here.double() - true).abs() <= spread * ROUNDING * len(ways)).all())
        hers = here.clone()
        dist.broadcast(hers, 0)
        bad = torch.tensor([not near, not torch.equal(hers, here)], dtype=torch.int32)
        dist.all_reduce(bad)
        if int(bad.sum()):
            wrong.append(name)
    del true, spread
    given, tensor = own.to(device), own.to(device, copy=True)
    took: dict[str, list[float]] = {name: [] for name in ways}
    began, repetitions, in_a_row = time.perf_counter(), 0, IN_A_ROW if num_bytes <= SMALL_BYTES else 1
    go_on = True
    while go_on:
        for name, way in ways.items():
            tensor.copy_(given)
            settle()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(in_a_row):
                way.sum_(tensor)
            settle()
            took[name].append((time.perf_counter() - start) / in_a_row)
        repetitions += 1
        enough = repetitions >= 5 and time.perf_counter() - began > seconds_a_way * len(ways)
        decision = torch.tensor([int(enough)])
        dist.broadcast(decision, 0)
        go_on = not int(decision)
    seconds = {}
    for name, mine in took.items():
        slowest = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds[name] = statistics.median(slowest[1:].tolist())
    return {"seconds": seconds, "repetitions": repetitions, "wrong": wrong}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of one mix."""
    names = list(rows[0]["seconds"])
    others = [name for name in names if name != "gloo"]
    head = ["size", *(title for name in names for title in (f"{name}, ms", "GB/s"))]
    cells = []
    for row in rows:
        size, seconds = row["bytes"], row["seconds"]
        line = [shown(size)]
        for name in names:
            line += [f"{seconds[name] * 1e3:.4g}", f"{size / 2**30 / seconds[name]:.2f}"]
        line += [f"{seconds['gloo'] / seconds[name]:.2f}×" for name in others]
        cells.append([*line, ", ".join(row["wrong"])])
    return tables.table([*head, *(f"{name}, × gloo" for name in others), "wrong"], cells)


def shown(num_bytes: int) -> str:
    """Return a size in its largest unit."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda", "mixed"), default="cpu")
    parser.add_argument("--ranks", type=numbers, default=[2, 3, 4])
    parser.add_argument("--sizes", type=numbers, default=list(SIZES), help="bytes of a tensor, with commas")
    parser.add_argument("--seconds", type=float, default=1.5, help="that each way is measured at each size")
    parser.add_argument("--chunk-kib", type=int, help="chunk of the exchange through shared memory")
    parser.add_argument("--json", type=Path, help="where to put the figures")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()

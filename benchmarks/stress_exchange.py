"""Many sums of random sizes through shared memory, with ranks that are killed in between.

    python benchmarks/stress_exchange.py [--sums 10000] [--ranks 2,3,4] [--seed 0]

Groups of ranks sum tensors of random sizes, again and again. In most of them one rank is killed (SIGKILL) at
a random moment: while the group forms, within a sum or between two. Some ranks walk in C, some in Python.
Every sum that a rank returns from must be right to its type's rounding, the survivors must raise at once, and
nothing may be left: no process, no segment.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm import native
from hetexp.comm.shared_memory.exchange import SharedMemoryExchange
from hetexp.comm.shared_memory.segment import PREFIX, reclaim, shared_memory_folder
from hetexp.core.errors import HandshakeError, PeerLostError, SetupError

MOST_NUMBERS = 2**19
"""Of a tensor, two chunks and more; sizes are drawn evenly by their logarithm."""
ROUND_SUMS = 500
"""Of a group at most."""
KILLED = 0.8
"""Share of groups that lose a rank."""
NAMED = 0.3
"""Share of groups whose memory has a name until all have opened it."""
IN_PYTHON = 0.25
"""Share of ranks that walk in Python."""
FORM_SECONDS = 2.0
"""How long ranks wait for one that died while the group formed."""
KILL_SECONDS = 1.5
"""From the start of a group to a kill, at most."""
HUNG_SECONDS = 30.0


@dataclass
class Found:
    """What came of all groups."""

    sums: int = 0
    """That every rank of a group returned from, and that were right."""
    groups: int = 0
    kills: int = 0
    notices: list[float] = field(default_factory=list)
    """Seconds from a kill to each survivor's error."""
    wrong: list[str] = field(default_factory=list)


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    found = stress(arguments.sums, arguments.ranks, arguments.seed)
    left = [path.name for path in shared_memory_folder().glob(f"{PREFIX}*")]
    latest = f", noticed within {max(found.notices):.3f} s" if found.notices else ""
    print(f"{found.sums} sums of {found.groups} groups, {found.kills} ranks killed{latest}")
    for problem in [*found.wrong, *(f"left behind: {name}" for name in left)]:
        print(problem)
    sys.exit(bool(found.wrong or left))


def stress(num_sums: int, ranks: list[int], seed: int, named: float = NAMED) -> Found:
    """Run groups until so many sums are done.

    Args:
        named: share of groups whose memory has a name at first.
    """
    draw, found = random.Random(seed), Found()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetexp.comm.shared_memory.exchange"])
    while found.sums < num_sums and not found.wrong:
        most = min(ROUND_SUMS, num_sums - found.sums)
        _group(context, draw.choice(ranks), draw, found, most, draw.random() < named)
        found.groups += 1
    reclaim(shared_memory_folder())  # as the next start of a run does
    return found


def _group(context: Any, size: int, draw: random.Random, found: Found, num_sums: int, named: bool) -> None:
    seeds = draw.getrandbits(32)
    victim = draw.randrange(size) if draw.random() < KILLED else None
    with tempfile.TemporaryDirectory(prefix="stress_") as folder:
        pipes = [context.Pipe() for _ in range(size)]
        processes = [
            context.Process(target=_rank, args=(rank, size, folder, pipes[rank][1], seeds, num_sums, named))
            for rank in range(size)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        killed_at = _kill(processes[victim], draw) if victim is not None else None
        ends: dict[int, tuple[str, float, int]] = {}
        deadline = time.monotonic() + HUNG_SECONDS
        for rank, (ours, _) in enumerate(pipes):
            try:
                if ours.poll(max(0.0, deadline - time.monotonic())):
                    ends[rank] = ours.recv()
                else:
                    found.wrong.append(f"rank {rank} of {size} hung (seed {seeds})")
            except EOFError:
                ends[rank] = ("killed", time.monotonic(), num_sums)
            ours.close()
        for process in processes:
            if process.is_alive():
                process.join(5)
                process.kill()
            process.join()
    _judge(ends, victim, killed_at, found)


def _kill(process: Any, draw: random.Random) -> float | None:
    """Kill a rank at a moment at which it may be anywhere, and return the moment; `None`: it was through."""
    if multiprocessing.connection.wait([process.sentinel], draw.random() * KILL_SECONDS):
        return None
    os.kill(process.pid, signal.SIGKILL)
    return time.monotonic()


def _judge(
    ends: dict[int, tuple[str, float, int]], victim: int | None, killed_at: float | None, found: Found
) -> None:
    if killed_at is not None:
        found.kills += 1
    for rank, (how, moment, _) in ends.items():
        if rank == victim and how == "killed":
            continue
        if how not in ("done", "lost"):
            found.wrong.append(f"rank {rank}: {how}")
        elif how == "lost" and killed_at is None:
            found.wrong.append(f"rank {rank} lost a rank, but all lived")
        elif how == "lost" and killed_at is not None:
            found.notices.append(max(0.0, moment - killed_at))
    found.sums += min((done for *_, done in ends.values()), default=0)


def _rank(rank: int, size: int, folder: str, pipe: Any, seed: int, num_sums: int, named: bool) -> None:
    torch.set_num_threads(1)
    done, draw = 0, random.Random(seed)
    if random.Random(seed + rank).random() < IN_PYTHON:
        os.environ[native.VARIABLE] = "0"
    try:
        store = dist.FileStore(str(Path(folder, "store")), size)
        path = SharedMemoryExchange.form(store, rank, size, FORM_SECONDS, torch.device("cpu"), named)
    except (HandshakeError, SetupError):
        pipe.send(("done", time.monotonic(), 0))  # one died while the group formed
        return
    try:
        for _ in range(num_sums):
            problem = _sum(path, rank, size, draw)
            if problem:
                pipe.send((problem, time.monotonic(), done))
                return
            done += 1
        pipe.send(("done", time.monotonic(), done))
    except PeerLostError:
        pipe.send(("lost", time.monotonic(), done))
    finally:
        path.close()


def _sum(path: SharedMemoryExchange, rank: int, size: int, draw: random.Random) -> str | None:
    """Sum one tensor and return what is wrong with the result."""
    numbers, seed = max(1, round(MOST_NUMBERS ** draw.random())), draw.getrandbits(32)
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    given = [
        torch.randn(numbers, generator=torch.Generator().manual_seed(seed + other)).to(dtype)
        for other in range(size)
    ]
    result = given[rank].clone()
    path.sum_(result)
    true = torch.stack(given).double().sum(dim=0)
    spread = torch.stack(given).double().abs().sum(dim=0)
    if bool(((result.double() - true).abs() > spread * torch.finfo(dtype).eps * size).any()):
        return f"a sum of {numbers} numbers of {dtype} was wrong"
    return None


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sums", type=int, default=10_000)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()

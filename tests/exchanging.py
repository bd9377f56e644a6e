"""Ranks as real processes that share memory, without a run around them."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Rank = Callable[..., Any]


def each(size: int, folder: Path, function: Rank, *arguments: Any, seconds: float = 60.0) -> list[Any]:
    """Call `function(rank, size, store, *arguments)` in a process a rank, and return the results in order.

    A rank that was killed gives `None`.

    Args:
        folder: for the store, new for each call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(
            target=_rank, args=(rank, size, str(folder / "store"), pipes[rank][1], function, arguments)
        )
        for rank in range(size)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    results = []
    try:
        for rank, (ours, _) in enumerate(pipes):
            assert ours.poll(seconds), f"rank {rank} gave nothing within {seconds:g} s"
            try:
                result, failure = ours.recv()
            except EOFError:
                result, failure = None, None
            assert failure is None, f"rank {rank}: {failure}"
            results.append(result)
    finally:
        for (ours, _), process in zip(pipes, processes, strict=True):
            ours.close()
            process.join(10)
            process.kill()
            process.join()
    return results


def _rank(rank: int, size: int, store: str, pipe: Any, function: Rank, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((function(rank, size, dist.FileStore(store, size), *arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # groups of torch's own do not go down safely without their peers

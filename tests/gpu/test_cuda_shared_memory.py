"""Sums of cards' tensors through shared memory, by the compiled walk and by Python's, and beside the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanging import each

from hetexp.comm import native
from hetexp.comm.shared_memory.exchange import CHUNK_BYTES, SMALL_BYTES, SharedMemoryExchange

LENGTHS = (1, 1000, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, CHUNK_BYTES + 7, 20 * CHUNK_BYTES // 4)


def own(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * rank + length))


def _sums(rank: int, size: int, store: dist.Store, kinds: list[str], how: str) -> list[bytes]:
    if how == "python":
        os.environ[native.VARIABLE] = "0"
    device = torch.device(kinds[rank])
    path = SharedMemoryExchange.form(store, rank, size, 60.0, device)
    if device.type == "cuda":
        assert path.page_locked
        assert bool(path._on_device) == (how == "c")
    results = []
    for length in (*LENGTHS, *reversed(LENGTHS)):
        tensor = torch.empty(length, device=device)
        tensor.copy_(own(rank, length), non_blocking=True)  # the sum has to wait for it
        path.sum_(tensor)
        results.append((tensor + 0).cpu().numpy().tobytes())
    codes = torch.full((3 * CHUNK_BYTES + 5,), rank + 1, dtype=torch.uint8, device=device)
    for other, found in enumerate(path.gather(codes)):
        assert found.device == codes.device
        assert bool((found == other + 1).all())
    path.close()
    return results


@pytest.mark.parametrize("how", ["c", "python"])
@pytest.mark.parametrize("kinds", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cuda:0", "cuda:0", "cpu"]])
def test_every_rank_gets_the_sum(tmp_path: Path, kinds: list[str], how: str) -> None:
    results = each(len(kinds), tmp_path, _sums, kinds, how, seconds=100.0)
    for position, length in enumerate((*LENGTHS, *reversed(LENGTHS))):
        everyone = [result[position] for result in results]
        assert all(one == everyone[0] for one in everyone)
        found = torch.frombuffer(bytearray(everyone[0]), dtype=torch.float32).double()
        parts = torch.stack([own(rank, length) for rank in range(len(kinds))]).double()
        bound = parts.abs().sum(dim=0) * 2.0**-23 * len(kinds)
        assert bool(((found - parts.sum(dim=0)).abs() <= bound).all())

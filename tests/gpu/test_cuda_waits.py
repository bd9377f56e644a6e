"""What a step may not do on a real card: wait for the device where it need not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hetexp.comm.communicator import MOST_ASIDE_BYTES, ProcessGroupCommunicator
from hetexp.comm.pulse import Pulse

LONG_CYCLES = 2_000_000_000
"""About a second of a card's clock."""


@pytest.fixture
def communicator() -> Iterator[ProcessGroupCommunicator]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    alone = ProcessGroupCommunicator(device, Pulse(dist.HashStore(), 0, 1, 30.0))
    alone.barrier()
    yield alone
    alone.close()


def test_a_count_is_reduced_while_the_card_computes(communicator: ProcessGroupCommunicator) -> None:
    count = torch.tensor([2**40 + 1])
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    pending = communicator.all_reduce_async(count)
    count.zero_()  # whoever gave it may go on with it
    result = pending.wait()
    assert not torch.cuda.current_stream().query()  # the card is still at it
    assert result.tolist() == [2**40 + 1]
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
def test_numbers_of_the_host_are_reduced_exactly(
    communicator: ProcessGroupCommunicator, dtype: torch.dtype
) -> None:
    for length in (1, MOST_ASIDE_BYTES // 8, MOST_ASIDE_BYTES):
        numbers = torch.arange(length).to(dtype).reshape(-1, 1).T
        result = communicator.all_reduce(numbers, "max")
        assert result.device.type == "cpu" and torch.equal(result, numbers)

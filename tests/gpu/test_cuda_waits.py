"""What a step may not do on a real card: wait for the device where it need not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hetexp.comm.communicator import MOST_ASIDE_BYTES, ProcessGroupCommunicator
from hetexp.comm.connections.pulse import Pulse
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.backends.cuda import CudaBackend
from hetexp.optimizer.build import build_optimizer
from hetexp.training.nonfinite.grad_check import skip_if_nonfinite

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


def test_a_number_is_read_while_the_card_goes_on() -> None:
    value = torch.tensor(2.5, device="cuda") * 2
    read = CudaBackend(CpuBackend.describe(0)).read_later(value)
    value.zero_()
    torch.cuda._sleep(LONG_CYCLES)
    assert read() == 5.0
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_card_updates_with_one_kernel_and_leaves_a_skipped_one_out(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64, dtype=dtype, device="cuda")
    optimizer = build_optimizer({"_target_": "torch.optim.AdamW", "lr": 0.1}, model)
    assert optimizer.param_groups[0]["fused"] is True
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for bad in (True, False):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan if bad else 1.0)
        with skip_if_nonfinite(optimizer, torch.tensor(bad, device="cuda")):
            optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert same == [bad, bad]
    assert all(state["step"].item() == 1.0 for state in optimizer.state.values())
    assert all(parameter.isfinite().all() for parameter in model.parameters())

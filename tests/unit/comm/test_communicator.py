"""Collectives on small tensors, over whatever device a rank has (case 11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import torch.distributed as dist
from exchanging import each

from hetexp.comm import communicator as module
from hetexp.comm.communicator import (
    Communicator,
    ProcessGroupCommunicator,
    ReduceOp,
    SoloCommunicator,
    peer_lost,
    stage,
)
from hetexp.comm.connections.pulse import Pulse
from hetexp.comm.shared_memory.exchange import SharedMemoryExchange
from hetexp.core.errors import PeerLostError, SetupError

CPU = torch.device("cpu")


class FakeTensor:
    """A tensor on a device that this machine has not; remembers where it was sent."""

    def __init__(self, device_type: str, sent: list[tuple[str, bool]]) -> None:
        self.device = torch.device(device_type)
        self._sent = sent

    def detach(self) -> FakeTensor:
        return self

    def to(self, device: torch.device, copy: bool = False) -> FakeTensor:
        self._sent.append((str(device), copy))
        return self

    def contiguous(self) -> FakeTensor:
        return self


@pytest.mark.parametrize(
    ("home", "group", "staged"),
    [
        ("cpu", "cpu", "cpu"),
        ("xpu", "cpu", "cpu"),
        ("mps", "cpu", "cpu"),
        ("meta", "cpu", "cpu"),
        ("cuda:0", "cpu", "cuda:0"),  # gloo reads CUDA's memory by itself
        ("cuda:0", "cuda:0", "cuda:0"),
        ("cpu", "cuda:0", "cuda:0"),  # NCCL reads nothing else
    ],
)
def test_where_a_tensor_is_staged(home: str, group: str, staged: str) -> None:
    sent: list[tuple[str, bool]] = []
    stage(cast(torch.Tensor, FakeTensor(home, sent)), torch.device(group))
    assert sent == [(staged, True)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.float32, torch.bfloat16])
def test_staging_copies_and_keeps_the_type(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).reshape(2, 3).T
    staged = stage(tensor, CPU)
    assert staged.dtype == dtype
    assert staged.is_contiguous()
    assert torch.equal(staged, tensor)
    staged.zero_()
    assert tensor.sum() == 15


def test_staging_leaves_the_graph() -> None:
    assert not stage(torch.ones(2, requires_grad=True), CPU).requires_grad


def test_staging_to_the_groups_own_device() -> None:
    assert stage(torch.ones(2), torch.device("meta")).device.type == "meta"


def test_only_sums_and_maxima() -> None:
    # A mean of integers differs by backend, so nobody may ask for one.
    assert set(get_args(ReduceOp)) == set(module._OPS) == {"sum", "max"}
    assert set(module._OPS.values()) == {dist.ReduceOp.SUM, dist.ReduceOp.MAX}


# ---------------------------------------------------------------- one rank


@pytest.fixture(params=["solo", "gloo"])
def alone(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """Each kind of communicator with one rank."""
    if request.param == "solo":
        yield SoloCommunicator()
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = ProcessGroupCommunicator(CPU, Pulse(dist.HashStore(), 0, 1, 30.0))
    yield group
    group.close()
    assert not dist.is_initialized()
    group.close()  # twice does no harm


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("value", [torch.tensor([2**62 + 1, -3]), torch.tensor(0.1, dtype=torch.float64)])
def test_one_rank_gets_its_own_value_exactly(alone: Communicator, op: ReduceOp, value: torch.Tensor) -> None:
    assert (alone.rank, alone.world_size) == (0, 1)
    result = alone.all_reduce(value, op)
    assert result.dtype == value.dtype
    assert torch.equal(result, value)
    alone.barrier()


def test_a_gathered_tensor_is_a_copy(alone: Communicator) -> None:
    mine = torch.arange(3)
    (one,) = alone.all_gather(mine)
    assert torch.equal(one, mine)
    one += 1
    assert mine.tolist() == [0, 1, 2]


def test_the_given_tensor_is_left_as_it_was(alone: Communicator) -> None:
    value = torch.ones(3)
    pending = alone.all_reduce_async(value)
    value.zero_()  # whoever gave it may go on with it
    result = pending.wait()
    assert torch.equal(result, torch.ones(3))
    result += 1
    assert torch.equal(value, torch.zeros(3))


# ---------------------------------------------------------------- a rank is gone


@pytest.fixture
def group() -> Iterator[ProcessGroupCommunicator]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    communicator = ProcessGroupCommunicator(CPU, Pulse(dist.HashStore(), 0, 1, 30.0))
    yield communicator
    communicator.close()


def test_a_failure_while_starting_is_a_lost_peer(
    group: ProcessGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = RuntimeError("[gloo] Connection closed by peer [10.0.0.2]:1234\nat transport.cc:5\nmore")

    def fails(*_: Any, **__: Any) -> None:
        raise cause

    monkeypatch.setattr(dist, "all_reduce", fails)
    with pytest.raises(PeerLostError, match="Connection closed by peer") as lost:
        group.all_reduce(torch.ones(1))
    assert "transport.cc" not in str(lost.value)
    assert lost.value.__cause__ is cause


def test_a_failure_while_waiting_is_a_lost_peer(
    group: ProcessGroupCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Work:
        def wait(self) -> None:
            raise RuntimeError("Timed out waiting 5000ms")

    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Work())
    pending = group.all_reduce_async(torch.ones(1))
    with pytest.raises(PeerLostError, match="Timed out waiting 5000ms"):
        pending.wait()
    with pytest.raises(PeerLostError):
        group.barrier()


def test_a_lost_peer_in_one_sentence() -> None:
    error = peer_lost(RuntimeError("first line\nsecond line"))
    assert str(error) == "a collective failed because another rank is gone or late (first line)"


def _small(rank: int, size: int, store: dist.Store, how: str) -> list[list[list[float]]]:
    dist.init_process_group("gloo", store=dist.PrefixStore("g", store), rank=rank, world_size=size)
    communicator = ProcessGroupCommunicator(CPU, Pulse(dist.PrefixStore("p", store), rank, size, 30.0))
    names = []

    def form(name: str) -> SharedMemoryExchange:
        names.append(name)
        if how == "refused":
            raise SetupError("no memory")
        return SharedMemoryExchange.form(dist.PrefixStore(name, store), rank, size, 30.0, CPU, small=True)

    if how != "gloo":
        communicator.form_rows = form
    results = []
    for other in (communicator.duplicate_for_rows(), communicator.duplicate_for_rows()):
        row = torch.tensor([1.0 + rank, 10.0 * rank], dtype=torch.float64)
        rows = other.all_gather_rows(row)
        assert row.tolist() == [1.0 + rank, 10.0 * rank]
        other.all_reduce_(row)
        results.append([*rows.tolist(), row.tolist()])
    assert how != "memory" or len(set(names)) == 2
    communicator.close()
    return results


@pytest.mark.parametrize("how", ["gloo", "memory", "refused"])
def test_rows_and_sums_of_ranks(tmp_path: Path, how: str) -> None:
    """By gloo, through memory that the ranks share, and by gloo since there is no such memory."""
    wanted = [[1.0, 0.0], [2.0, 10.0], [3.0, 10.0]]
    assert each(2, tmp_path, _small, how) == [[wanted, wanted]] * 2

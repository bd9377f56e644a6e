"""A group is given up before its collectives are ended, and nothing that it returns afterwards counts."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from hetexp.comm.connections import revocation as module
from hetexp.comm.connections.revocation import Revocation, quiet_watchdog
from hetexp.core.errors import PeerLostError

CPU = torch.device("cpu")


class Group:
    """Stands for a communicator whose collectives hang until it is aborted."""

    def __init__(self, beside: Group | None = None) -> None:
        self.ended, self.beside = threading.Event(), beside

    def abort(self) -> None:
        self.ended.set()
        if self.beside is not None:
            assert self.beside.ended.wait(20.0)


@pytest.fixture
def native() -> Revocation:
    revocation = Revocation()
    revocation.native = True
    return revocation


def test_a_group_whose_collectives_raise_needs_none() -> None:
    revocation = Revocation()
    revocation.revoke()
    assert revocation.snapshot(CPU) is None
    revocation.check()
    with revocation.calling(), revocation.waiting():
        pass


def test_a_snapshot_tells_what_was_so_when_the_device_came_to_it(native: Revocation) -> None:
    before = native.snapshot(CPU)
    native.revoke()
    after = native.snapshot(CPU)
    assert before is not None
    assert after is not None
    assert (bool(before), bool(after)) == (False, True)


def test_no_collective_follows(native: Revocation) -> None:
    with native.calling():
        pass
    native.revoke()
    with pytest.raises(PeerLostError), native.calling():
        pytest.fail("the block must not run")
    with pytest.raises(PeerLostError), native.waiting():
        pass
    assert native.wait_for(lambda: 2.0) == 2.0


def test_an_abort_waits_until_no_collective_starts(native: Revocation) -> None:
    group = Group()
    native.groups.append(group)
    begun, go = threading.Event(), threading.Event()

    def train() -> None:
        with native.calling():
            begun.set()
            go.wait(20.0)
            assert not group.ended.is_set()
        native.leave()

    training = threading.Thread(target=train)
    training.start()
    assert begun.wait(20.0)
    native.revoke()
    ending = threading.Thread(target=native.abort)
    ending.start()
    go.set()
    assert native.wait_for_abort(20.0)
    for thread in (training, ending):
        thread.join()
    assert group.ended.is_set()


def test_groups_end_side_by_side(native: Revocation) -> None:
    """The first one's kernels are queued behind those of the second."""
    second = Group()
    native.groups += [Group(beside=second), second]
    native.leave()
    native.abort()
    assert native.wait_for_abort(0.0)
    native.abort()  # does nothing


def test_an_abort_that_hangs(native: Revocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABORT_SECONDS", 0.01)
    never = Group()
    native.groups.append(Group(beside=never))
    native.leave()
    native.abort()
    assert native.failed
    assert not native.wait_for_abort(0.0)
    never.ended.set()


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", raising=False)
    with quiet_watchdog():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_RETHROW_CUDA_ERRORS" not in os.environ

"""DDP's buckets are averaged beside backward; what a wire loses stays with its parameters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from hetexp.comm.exchange import Exchange
from hetexp.comm.hook import Feedback, GradientHook
from hetexp.core.cost.step import Wire
from hetexp.core.errors import PeerLostError


class Twice(Exchange):
    """Another rank that has the same gradients as this one."""

    name, rank, size = "twice", 0, 2

    def __init__(self) -> None:
        self.fails = False
        self.threads: set[str] = set()

    def sum_(self, tensor: torch.Tensor) -> None:
        self.threads.add(threading.current_thread().name)
        if self.fails:
            raise PeerLostError("rank 1 of the exchange is gone")
        tensor.mul_(2)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.sum_(torch.zeros(1))
        return [tensor, tensor.clone()]


class Bucket:
    """What DDP hands over."""

    def __init__(self, parameters: list[torch.Tensor], gradient: torch.Tensor) -> None:
        self._parameters, self._gradient = parameters, gradient

    def buffer(self) -> torch.Tensor:
        return self._gradient

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters


@pytest.fixture
def other() -> Twice:
    return Twice()


@pytest.fixture
def hooks(other: Twice) -> Iterator[list[GradientHook]]:
    made: list[GradientHook] = []
    yield made
    for one in made:
        one.close()


def averaged(hook: GradientHook, parameters: list[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    bucket = cast(dist.GradBucket, Bucket(parameters, gradient.clone()))
    result: torch.Tensor = hook.hook(None, bucket).wait()
    return result


def test_it_averages_in_a_thread_of_its_own(other: Twice, hooks: list[GradientHook]) -> None:
    hook = GradientHook(other, "float32", 2)
    hooks.append(hook)
    gradient = torch.randn(100)
    for _ in range(3):
        assert torch.equal(averaged(hook, [torch.zeros(100)], gradient), gradient)
    assert other.threads == {"gradients"}
    assert hook.sent_bytes == 3 * 400
    assert hook.exchange_seconds > 0


@pytest.mark.parametrize(("wire", "sent"), [("bfloat16", 200), ("int8", 260)])
def test_wires_send_less_and_lose_nothing_for_good(
    other: Twice, hooks: list[GradientHook], wire: Wire, sent: int
) -> None:
    hook = GradientHook(other, wire, 2)
    hooks.append(hook)
    parameter, gradient = torch.zeros(100), torch.randn(100, generator=torch.Generator().manual_seed(3))
    total = torch.zeros(100)
    for _ in range(50):
        total += averaged(hook, [parameter], gradient)
    assert hook.sent_bytes == 50 * sent
    (lost,) = hook.feedback.lost.values()
    # The other rank lost as much, of halves that were sent.
    torch.testing.assert_close(total + 2 * lost, 50 * gradient, rtol=1e-4, atol=1e-4)


def test_a_lost_rank_is_told_to_backward(other: Twice, hooks: list[GradientHook]) -> None:
    hook = GradientHook(other, "float32", 2)
    hooks.append(hook)
    other.fails = True
    for _ in range(2):  # also the buckets that come after it
        with pytest.raises(Exception, match="rank 1 of the exchange is gone"):
            averaged(hook, [torch.zeros(4)], torch.ones(4))
    other.fails = False
    assert torch.equal(averaged(hook, [torch.zeros(4)], torch.ones(4)), torch.ones(4))


def test_feedback_follows_the_parameters_into_other_buckets() -> None:
    one, two, three = torch.zeros(2), torch.zeros(3), torch.zeros(4)
    feedback = Feedback()
    feedback.of([one, two], torch.zeros(5)).copy_(torch.arange(5.0))
    feedback.of([three], torch.zeros(4)).fill_(9.0)
    # DDP makes its buckets anew, in the order in which gradients came.
    first = feedback.of([three, two], torch.zeros(7))
    assert first.tolist() == [9, 9, 9, 9, 2, 3, 4]
    assert feedback.of([one], torch.zeros(2)).tolist() == [0, 1]
    first += 1
    assert feedback.of([three, two], torch.zeros(7)) is first
    assert feedback.lost[two].tolist() == [3, 4, 5]


def test_a_sparse_gradient_is_averaged(other: Twice, hooks: list[GradientHook]) -> None:
    hook = GradientHook(other, "int8", 2)
    hooks.append(hook)
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 4]]), torch.tensor([[2.0, 3.0], [5.0, 7.0]]), (9, 2))
    mean = averaged(hook, [torch.zeros(9, 2)], gradient)
    assert torch.equal(mean.to_dense(), gradient.to_dense())  # both ranks have the same


def test_what_is_not_finite_spoils_no_later_step(other: Twice, hooks: list[GradientHook]) -> None:
    hook = GradientHook(other, "int8", 2)
    hooks.append(hook)
    parameter, bad = torch.zeros(260), torch.ones(260)
    bad[7] = torch.inf
    assert torch.isnan(averaged(hook, [parameter], bad)).any()
    good = torch.ones(260)
    torch.testing.assert_close(averaged(hook, [parameter], good), good, rtol=0.02, atol=0.0)


def test_it_ends_after_what_is_under_way(other: Twice) -> None:
    hook = GradientHook(other, "float32", 2)
    futures: list[Any] = [
        hook.hook(None, cast(dist.GradBucket, Bucket([torch.zeros(2)], torch.ones(2)))) for _ in range(5)
    ]
    hook.close()
    assert all(future.done() for future in futures)

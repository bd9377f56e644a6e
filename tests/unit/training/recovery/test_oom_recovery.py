"""Memory runs out on a rank: what is cut, what is told, and what stays as it was."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_ranks import FakeGroup
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.comm.step_message import StepMessage
from hetexp.core.errors import PeerLostError
from hetexp.data.loader import LocalBatch
from hetexp.data.sampler import Position
from hetexp.strategy.single import Single
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.nonfinite.loss_scale import LossScale
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import (
    DeviceMemoryError,
    OutOfMemory,
    fatal_out_of_memory,
    halve_on_all_ranks,
    recovering_guard,
    sizes_of,
    split_microbatches,
)
from hetexp.training.state import TrainState

MakeState = Callable[..., TrainState]
Pair = namedtuple("Pair", ["first", "second"])


def microbatches(*sizes: int) -> list[Any]:
    start, made = 0, []
    for size in sizes:
        made.append((torch.arange(start, start + size), torch.arange(start, start + size) * 2))
        start += size
    return made


# ---------------------------------------------------------------- cutting


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 25))
def test_order_and_samples_stay_as_they_were(sizes: list[int], most: int) -> None:
    pieces = split_microbatches(microbatches(*sizes), most)
    assert torch.cat([inputs for inputs, _ in pieces]).tolist() == list(range(sum(sizes)))
    assert torch.cat([targets for _, targets in pieces]).tolist() == [2 * i for i in range(sum(sizes))]
    assert all(1 <= size <= most for size in sizes_of(pieces))


def test_without_limit_and_without_samples_nothing_is_cut() -> None:
    whole = microbatches(5, 4)
    assert split_microbatches(whole, None) is whole
    assert split_microbatches([], 2) == []
    assert split_microbatches(whole, 5) == whole


def test_whatever_a_loader_collates_is_cut() -> None:
    inputs = {"ids": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0)}
    targets = Pair(torch.arange(3), [torch.arange(3), torch.arange(3)])
    first, second = split_microbatches([(inputs, targets)], 2)
    assert first[0]["ids"].tolist() == [[0, 1], [2, 3]]
    assert [piece[0]["names"] for piece in (first, second)] == [["a", "b"], ["c"]]
    assert second[0]["scale"] == 2.0
    assert isinstance(second[1], Pair)
    assert second[1].first.tolist() == [2]
    assert [part.tolist() for part in second[1].second] == [[2], [2]]


# ---------------------------------------------------------------- deciding


def test_only_the_rank_in_trouble_halves_and_all_know(make_state: MakeState) -> None:
    def rank(comm: Communicator) -> tuple[bool, list[int | None]]:
        state = make_state(comm, (1, 1, 1))
        short = OutOfMemory("no more", 2**20) if comm.rank == 1 else None
        again = halve_on_all_ranks(state, 3, microbatches(3, 2), short)
        return again, state.microbatch_limits

    assert FakeGroup(3).run(rank) == [(True, [None, 2, None])] * 3


def test_without_a_shortage_nothing_is_done_again(make_state: MakeState) -> None:
    def rank(comm: Communicator) -> tuple[bool, list[int | None]]:
        state = make_state(comm, (1, 1))
        return halve_on_all_ranks(state, 3, microbatches(4), None), state.microbatch_limits

    assert FakeGroup(2).run(rank) == [(False, [None, None])] * 2


def test_a_single_sample_ends_all(make_state: MakeState) -> None:
    def rank(comm: Communicator) -> BaseException:
        state = make_state(comm, (1, 1))
        short = OutOfMemory("CUDA out of memory.", 3 * 2**20) if comm.rank == 1 else None
        with pytest.raises((DeviceMemoryError, PeerLostError)) as caught:
            halve_on_all_ranks(state, 6, microbatches(1, 1, 1), short)
        assert state.microbatch_limits == [None, None]
        return caught.value

    other, own = FakeGroup(2).run(rank)
    assert isinstance(other, PeerLostError)
    assert isinstance(own, DeviceMemoryError)
    for error in (other, own):
        assert "Rank 1, cpu:1" in str(error)
        assert "in step 7, with its share of 3 samples in microbatches of 1 (3.0 MiB were free)" in str(error)
    assert "CUDA out of memory. Choose a smaller model" in str(own)


@pytest.mark.parametrize(
    ("world", "non_finite", "scale", "recovers"),
    [
        (1, "continue", False, True),
        (2, "continue", False, False),
        (2, "continue", True, True),
        (2, "skip", False, True),
        (2, "stop", False, True),
    ],
)
def test_nobody_learns_of_it_where_nobody_looks(
    make_state: MakeState, world: int, non_finite: str, scale: bool, recovers: bool
) -> None:
    def rank(comm: Communicator) -> bool:
        state = make_state(comm, (1,) * world, non_finite=non_finite)
        state.strategy = Single()
        state.loss_scale = LossScale() if scale else None
        guard = recovering_guard(state, together=True)
        assert isinstance(state.module, EmptyShareGuard)
        assert state.module.catches == recovers
        return guard is not None

    assert FakeGroup(world).run(rank) == [recovers] * world


def test_other_errors_pass(make_state: MakeState) -> None:
    state = make_state(SoloCommunicator())
    with pytest.raises(RuntimeError, match="shapes"), fatal_out_of_memory(state, 0, [4], "No."):
        raise RuntimeError("shapes do not match")
    told = pytest.raises(DeviceMemoryError, match="in microbatches of 4 .* No. no more. Choose")
    with told, fatal_out_of_memory(state, 0, [4, 3], "No."):
        raise torch.OutOfMemoryError("no more\nsee the manual")


# ---------------------------------------------------------------- a step


class Hungry(nn.Linear):
    """A linear layer whose pass over more than `most` samples runs out of memory."""

    most = 2

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("no more")
        return super().forward(inputs)


def one_step(make_state: MakeState, most: int, scale: LossScale | None) -> tuple[TrainState, StepTimer]:
    torch.manual_seed(0)
    model = Hungry(3, 4)
    model.most = most
    state = make_state(SoloCommunicator(), precision="float64", model=model)
    state.strategy, state.module, state.loss_scale = Single(), EmptyShareGuard(model), scale
    state.guard = recovering_guard(state, together=True)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    batch = LocalBatch([(inputs, torch.arange(8) % 4)], 8, 8, Position(0, 8))
    meter = StepTimer(state.backend)
    state.engine.step(0, batch, LossNormalizer(StepMessage(state.communicator), 1, loss_scale=scale), meter)
    return state, meter


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_is_done_again_is_the_same_step(make_state: MakeState, scaled: bool) -> None:
    scale = LossScale(1024.0, good_steps=7) if scaled else None
    plain, _ = one_step(make_state, 8, LossScale(1024.0) if scaled else None)
    state, meter = one_step(make_state, 2, scale)
    for ours, theirs in zip(state.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert state.microbatch_limits == [2]
    assert state.guard is not None and state.guard.shortage is None
    assert meter.samples == 8
    assert len(meter._waits) == 4  # of the passes that counted, none of those before
    assert state.schedule.last_epoch == 1
    if scale is not None:  # no overflow
        assert (scale.value, scale.good_steps) == (1024.0, 8)


def test_the_checkpoint_and_the_metrics_tell(make_state: MakeState) -> None:
    from hetexp.training.saving.save import provenance

    state, _ = one_step(make_state, 2, None)
    assert provenance(state)[0]["microbatch_limit"] == 2
    assert state.pass_sizes(7) == [2, 2, 2, 1]

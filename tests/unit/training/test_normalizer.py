"""The factor: the same on every rank, from the counts of all of them (cases 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from fake_ranks import FakeGroup
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.step_message import StepMessage
from hetexp.training.normalizer import LossNormalizer


def factors(counts: Sequence[float], gradient_divisor: int, per: str = "global") -> list[tuple[float, float]]:
    def rank(comm: Communicator) -> tuple[float, float]:
        normalizer = LossNormalizer(StepMessage(comm), gradient_divisor, per)  # type: ignore[arg-type]
        normalizer.start(counts[comm.rank])
        return normalizer.factor()

    return FakeGroup(len(counts)).run(rank)


@settings(deadline=None, max_examples=30)
@given(
    counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=4).filter(any),
    gradient_divisor=st.integers(1, 8),
)
def test_the_factor_is_the_same_on_every_rank(counts: list[int], gradient_divisor: int) -> None:
    total = sum(counts)
    assert factors(counts, gradient_divisor) == [(gradient_divisor / total, total)] * len(counts)


@pytest.mark.parametrize("per", ["global", "per_rank"])
def test_nothing_that_counts_anywhere(per: str) -> None:
    for factor, total in factors([0, 0, 0], 3, per):
        assert total == 0
        assert factor * 0.0 == 0.0  # finite: an empty sum stays zero, not NaN
    if per == "global":
        assert factors([0, 0], 2) == [(0.0, 0), (0.0, 0)]


def test_per_rank_divides_by_each_ranks_own_count() -> None:
    assert factors([6, 2, 0], 3, "per_rank") == [(1 / 6, 8), (1 / 2, 8), (1.0, 8)]


@settings(deadline=None, max_examples=20)
@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=4).filter(any), seed=st.integers(0, 99))
def test_averaged_gradients_are_the_global_mean(counts: list[int], seed: int) -> None:
    values = torch.randn(sum(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pieces = values.split(counts)
    world = len(counts)
    parts = [piece.sum() * factor for piece, (factor, _) in zip(pieces, factors(counts, world), strict=True)]
    averaged = sum(parts) / world  # what DDP does
    assert float(averaged) == pytest.approx(float(values.mean()), rel=1e-12, abs=1e-12)


def test_one_rank_that_exchanges_nothing() -> None:
    normalizer = LossNormalizer(StepMessage(SoloCommunicator()), 1)
    for count in (5, 3):
        normalizer.start(count)
        assert normalizer.factor() == (1 / count, count)


def test_counts_beyond_floats_stay_exact() -> None:
    big = 2**53 + 1
    assert [total for _, total in factors([big, 2], 2)] == [big + 2] * 2


@pytest.mark.parametrize("tells", [False, True])
def test_counts_that_are_not_whole_travel_as_they_are(tells: bool) -> None:
    counts = [0.3, 2**33 + 0.25, 4, 0.0]

    def rank(comm: Communicator) -> tuple[float, float]:
        normalizer = LossNormalizer(StepMessage(comm), 4)
        normalizer.message.seconds = 1.0 if tells else None
        normalizer.start(counts[comm.rank])
        return normalizer.factor()

    told = FakeGroup(4).run(rank)
    assert told == [told[0]] * 4
    assert told[0][1] == pytest.approx(sum(counts), rel=1e-15)
    assert told[0][0] == 4 / told[0][1]
    assert factors([0.3, 0.2], 2, "per_rank")[0][0] == 1 / 0.3


def test_a_step_starts_with_its_count() -> None:
    with pytest.raises(AssertionError, match="comes first"):
        LossNormalizer(StepMessage(SoloCommunicator()), 1).factor()


def test_every_rank_learns_what_each_reported() -> None:
    def rank(comm: Communicator) -> tuple[tuple[float, float], list[float]]:
        normalizer = LossNormalizer(StepMessage(comm), 3)
        normalizer.message.seconds = 0.1 + comm.rank
        normalizer.start(5 * comm.rank)
        return normalizer.factor(), normalizer.message.all_seconds

    assert FakeGroup(3).run(rank) == [((3 / 15, 15), [0.1, 1.1, 2.1])] * 3


def test_without_a_report_nothing_is_reported() -> None:
    normalizer = LossNormalizer(StepMessage(SoloCommunicator()), 1)
    normalizer.start(4)
    assert normalizer.factor() == (0.25, 4)
    assert normalizer.message.all_seconds == []


@pytest.mark.parametrize(("per", "expected"), [("global", (10, [7, 2**33 + 3])), ("per_rank", None)])
def test_each_term_is_divided_by_its_own_count_of_all_ranks(
    per: Literal["global", "per_rank"], expected: tuple[float, list[float]] | None
) -> None:
    terms: list[list[float]] = [[5, 2**33], [2, 3]]

    def rank(comm: Communicator) -> tuple[float, list[float]]:
        normalizer = LossNormalizer(StepMessage(comm), 2, per)
        normalizer.start([4, 6][comm.rank], terms[comm.rank])
        normalizer.factor()
        count, of_terms = normalizer.term_counts
        return count, list(of_terms)

    own = [(4, terms[0]), (6, terms[1])]
    assert FakeGroup(2).run(rank) == ([expected] * 2 if expected is not None else own)


def test_the_mean_loss_of_a_window_counts_the_step_that_is_under_way() -> None:
    """A rank that is lost before the next line takes its sums with it: all know the mean by then."""

    def rank(comm: Communicator) -> float | None:
        message = StepMessage(comm)
        message.window = (torch.tensor(8.0), 4.0) if comm.rank == 0 else (2.0, 1.0)
        message.send([3, 2][comm.rank])
        message.receive()
        message.share_loss(torch.tensor([6.0, 4.0][comm.rank]))
        return message.window_loss

    assert FakeGroup(2).run(rank) == [(8 + 2 + 6 + 4) / (4 + 1 + 3 + 2)] * 2

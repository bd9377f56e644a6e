"""Losses are sums and counts: any cut of a batch adds up to torch's own mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import own_loop
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from hetexp.core.errors import ConfigError
from hetexp.model.base import WithAuxiliary
from hetexp.training.logits import many_logits
from hetexp.training.loss import (
    IGNORED,
    CrossEntropy,
    Loss,
    MeanSquaredError,
    build_loss,
    check_loss,
    count_of,
    summed,
    total_loss,
)

ONE_OF = "`trainer.loss` must be one of cross_entropy, "


class Absolute(Loss):
    """A person's own."""

    def count(self, targets: Any) -> int:
        return len(targets)

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        result: torch.Tensor = (output - targets).abs().sum()
        return result


class NotALoss:
    """Something else with a constructor."""


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(seed: int, classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(batch=st.integers(1, 12), cut=st.integers(0, 12), seed=st.integers(0, 1000))
def test_cross_entropy_adds_up_to_the_mean_over_any_cut(batch: int, cut: int, seed: int) -> None:
    loss, output, targets = CrossEntropy(), draw(seed, batch, 5), labels(seed, 5, batch)
    parts = [(output[:cut], targets[:cut]), (output[cut:], targets[cut:])]
    total = sum(float(loss.total(o, t)) for o, t in parts)
    count = sum(loss.count(t) for _, t in parts)
    assert count == batch
    assert total / count == pytest.approx(functional.cross_entropy(output, targets).item(), rel=1e-12)
    assert sum(loss.correct(o, t) for o, t in parts) == int((output.argmax(1) == targets).sum())


def test_tokens_count_only_where_they_have_a_label() -> None:
    loss, output, targets = CrossEntropy(), draw(0, 3, 4, 7), labels(0, 7, 3, 4)
    targets[0, 1:] = IGNORED
    targets[2] = IGNORED
    mean = functional.cross_entropy(
        output.flatten(0, 1), targets.flatten()
    )  # torch leaves -100 out by itself
    assert loss.count(targets) == 5
    assert (loss.total(output, targets) / loss.count(targets)).item() == pytest.approx(mean.item(), rel=1e-12)
    assert (
        loss.correct(targets.clamp(min=0).eq(torch.arange(7).view(7, 1, 1)).permute(1, 2, 0).float(), targets)
        == 5
    )


def test_right_predictions_do_not_count_where_the_label_is_ignored() -> None:
    output = torch.eye(3)
    assert CrossEntropy().correct(output, torch.tensor([0, 1, 1])) == 2
    assert CrossEntropy().correct(output, torch.tensor([0, IGNORED, IGNORED])) == 1


@pytest.mark.parametrize(
    ("output", "targets"),
    [((6, 3), (6, 1)), ((6, 1, 3), (6,)), ((3, 2, 3), (3, 2, 1)), ((6, 3), (2, 3)), ((2, 3, 3), (6,))],
)
def test_labels_in_a_column_are_labels(output: tuple[int, ...], targets: tuple[int, ...]) -> None:
    """Whatever dimensions of size 1 there are: the classes are those of the rows, in their order."""
    loss, scores, classes = CrossEntropy(), draw(0, 6, 3), labels(1, 3, 6)
    classes[4] = IGNORED
    scores[0, classes[0]] = 9.0
    args = scores.reshape(output), classes.reshape(targets)
    assert loss.correct(*args) == loss.correct(scores, classes) > 0
    assert loss.total(*args) == loss.total(scores, classes)


@pytest.mark.parametrize(
    ("output", "targets"),
    [
        ((6, 3), (6, 2)),  # one-hot, or two labels each
        ((6, 3), (1,)),
        ((6, 1, 3), (1, 2)),
        ((2, 3, 4), (3, 2)),  # as many, in another order
        ((6,), (6,)),
    ],
)
def test_labels_of_other_shapes_are_refused(output: tuple[int, ...], targets: tuple[int, ...]) -> None:
    args = torch.zeros(output), torch.zeros(targets, dtype=torch.int64)
    for ask in (CrossEntropy().total, CrossEntropy().correct):
        with pytest.raises(ConfigError) as caught:
            ask(*args)
        assert f"{list(output)} and {list(targets)}" in str(caught.value)


def test_only_ignored_labels_give_zero_and_a_gradient_of_zero() -> None:
    output = draw(1, 3, 5).requires_grad_()
    targets = torch.full((3,), IGNORED)
    total = CrossEntropy().total(output, targets)
    total.backward()
    assert CrossEntropy().count(targets) == 0
    assert total.item() == 0.0
    assert output.grad is not None
    assert torch.count_nonzero(output.grad) == 0


@pytest.mark.parametrize(
    ("loss", "output", "targets"),
    [
        (CrossEntropy(), torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)),
        (CrossEntropy(), torch.zeros(0, 4, 5), torch.zeros(0, 4, dtype=torch.int64)),
        (MeanSquaredError(), torch.zeros(0, 2), torch.zeros(0, 2)),
    ],
)
def test_an_empty_batch_gives_zero(loss: Loss, output: torch.Tensor, targets: torch.Tensor) -> None:
    total = loss.total(output, targets)
    assert total.shape == ()
    assert total.item() == 0.0
    assert loss.count(targets) == 0
    assert loss.correct(output, targets) in (0, None)


@settings(deadline=None, max_examples=30)
@given(batch=st.integers(1, 12), cut=st.integers(0, 12), seed=st.integers(0, 1000))
def test_squared_error_adds_up_to_the_mean_over_any_cut(batch: int, cut: int, seed: int) -> None:
    loss, output, targets = MeanSquaredError(), draw(seed, batch, 3), draw(seed + 1, batch, 3)
    parts = [(output[:cut], targets[:cut]), (output[cut:], targets[cut:])]
    total = sum(float(loss.total(o, t)) for o, t in parts)
    count = sum(loss.count(t) for _, t in parts)
    assert count == 3 * batch
    assert total / count == pytest.approx(functional.mse_loss(output, targets).item(), rel=1e-12)
    assert loss.correct(output, targets) is None


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "bce", "reconstruction"])
@pytest.mark.parametrize("shape", [(1, 3), (4, 1), (3,), (3, 4), (12,), (1,), (1, 4, 3)])
def test_numbers_of_other_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="one shape"):
        build_loss(name).total(torch.zeros(4, 3), torch.zeros(*shape))


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "bce", "reconstruction"])
@pytest.mark.parametrize("shape", [(4,), (4, 1, 1)])
def test_dimensions_of_size_1_are_no_difference(name: str, shape: tuple[int, ...]) -> None:
    """torch would broadcast [4, 1] against [4] to 16 differences of which 12 mean nothing."""
    loss, output, targets = build_loss(name), draw(0, 4, 1), draw(1, 4, 1).sigmoid()
    assert loss.total(output, targets.reshape(shape)) == loss.total(output, targets)


@pytest.mark.parametrize("name", ["cross_entropy", "mse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_total_is_a_scalar_of_the_outputs_precision(name: str, dtype: torch.dtype) -> None:
    output = draw(0, 4, 3).to(dtype)
    targets = labels(0, 3, 4) if name == "cross_entropy" else draw(1, 4, 3).to(dtype)
    total = build_loss(name).total(output, targets)
    assert total.shape == ()
    assert total.dtype == dtype


def test_losses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "own_losses", sys.modules[__name__])
    assert isinstance(build_loss("cross_entropy"), CrossEntropy)
    assert isinstance(build_loss("mse"), MeanSquaredError)
    assert isinstance(build_loss("own_losses.Absolute"), Absolute)
    assert check_loss("mse") == check_loss("own_losses.Absolute") == []
    assert Absolute().correct(torch.zeros(1), torch.zeros(1)) is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "hinge",
            "`trainer.loss` must be one of cross_entropy, bce, mse, mae, huber, reconstruction, model, sum "
            "or the dotted path of a class, but is 'hinge'",
        ),
        ("no_such.Loss", ONE_OF),
        ("torch.nn.Nope", ONE_OF),
        ("torch.nn", ONE_OF),
        ("own_losses.NotALoss", "`trainer.loss` must be a class derived from hetexp.training.loss.Loss"),
        (
            "torch.nn.CrossEntropyLoss",
            "`trainer.loss` must be a class derived from hetexp.training.loss.Loss",
        ),
        ("hetexp.training.loss.Loss", ONE_OF),
    ],
)
def test_a_wrong_loss_is_told(monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "own_losses", sys.modules[__name__])
    (problem,) = check_loss(name)
    assert problem.startswith(told)


@pytest.mark.parametrize("loss", [CrossEntropy(), MeanSquaredError(), Absolute()])
def test_counts_of_samples_sum_to_the_count(loss: Loss) -> None:
    targets = labels(0, 5, 6, 4).masked_fill(labels(1, 2, 6, 4).bool(), IGNORED)
    counts = loss.counts(targets)
    assert counts.tolist() == [loss.count(targets[index : index + 1]) for index in range(6)]
    assert int(counts.sum()) == loss.count(targets)


class Counting(Loss):
    """Gives whatever it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def count(self, targets: Any) -> float:
        answer: float = self.answer
        return answer

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        return torch.zeros(())


@pytest.mark.parametrize(
    ("answer", "count"),
    [(3, 3), (0, 0), (0.25, 0.25), (torch.tensor(7), 7), (torch.tensor([0.5]), 0.5), (np.float32(1.5), 1.5)],
)
def test_counts_of_any_kind_of_number(answer: Any, count: float) -> None:
    found = count_of(Counting(answer), None)
    assert (found, type(found)) == (count, type(count))


@pytest.mark.parametrize(
    "answer", [math.nan, -1, -0.5, math.inf, None, "3", torch.tensor([1.0, 2.0]), torch.tensor(math.nan)]
)
def test_a_count_that_is_no_number_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigError, match=r"`Counting\.count` must be a finite number from 0 on"):
        count_of(Counting(answer), None)
    with pytest.raises(ConfigError, match=r"`Counting\.count` must be a finite number from 0 on"):
        Counting(answer).counts(torch.zeros(2))


def test_counts_of_weighted_samples() -> None:
    targets = torch.tensor([0, 1, 2, 1])
    weights = own_loop.CLASS_WEIGHTS[targets]
    assert own_loop.Weighted().counts(targets).tolist() == weights.tolist()
    output, auxiliary = draw(0, 4, 3), draw(1, 4)
    with_it = total_loss(own_loop.Weighted(), WithAuxiliary(output, auxiliary), targets)
    alone = own_loop.Weighted().total(output, targets)
    assert float(with_it - alone) == pytest.approx(float((auxiliary * weights).sum()), rel=1e-12)


def test_an_auxiliary_loss_counts_at_each_element_of_its_sample() -> None:
    output, targets = draw(0, 4, 3, 5), labels(0, 5, 4, 3)
    targets[1, 1:] = IGNORED  # one element is left of that sample
    auxiliary = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    loss = CrossEntropy()
    total = total_loss(loss, WithAuxiliary(output, auxiliary), targets)
    assert float(total - loss.total(output, targets)) == pytest.approx(3 * 1 + 1 * 10 + 3 * 100 + 3 * 1000)
    parts = [
        total_loss(loss, WithAuxiliary(output[a:b], auxiliary[a:b]), targets[a:b])
        for a, b in ((0, 1), (1, 4))
    ]
    assert float(sum(parts)) == pytest.approx(float(total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, 37, 100, 10**6])
def test_half_precision_is_added_up_in_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    """As if all logits had been cast, whatever part of them is held in float32 at a time."""
    monkeypatch.setattr(many_logits, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(3, 7, 13, generator=generator)).to(dtype)
    logits[1, 2, :5] = -torch.inf  # masked out
    targets = torch.randint(5, 13, (3, 7), generator=generator)
    targets[0, :3] = IGNORED
    own, cast = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    total = CrossEntropy().total(own, targets)
    wanted = functional.cross_entropy(
        cast.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0)
    (total * 0.37).backward()
    (wanted * 0.37).backward()
    assert own.grad is not None and cast.grad is not None
    assert own.grad.dtype == dtype
    # Both are float32's result rounded once: they may fall on neighbours.
    torch.testing.assert_close(own.grad, cast.grad, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert not own.grad[0, :3].any()


def test_many_logits_without_data_show_what_memory_they_take() -> None:
    rows = torch.empty(2**12, 2**14, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert rows.numel() > many_logits.CHUNK
    total = CrossEntropy().total(rows, torch.empty(2**12, dtype=torch.int64, device="meta"))
    total.backward()
    assert rows.grad is not None and rows.grad.dtype == torch.bfloat16


def test_many_logits_that_are_not_finite_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_logits, "CHUNK", 4)
    logits = torch.zeros(5, 4, dtype=torch.bfloat16)
    logits[3, 1] = torch.inf
    own = logits.requires_grad_()
    total = CrossEntropy().total(own, torch.zeros(5, dtype=torch.int64))
    assert not torch.isfinite(total)
    total.backward()
    assert own.grad is not None
    assert torch.isnan(own.grad[3]).any()
    assert torch.isfinite(own.grad[:3]).all()


def test_a_loss_of_ones_own_is_given_float32() -> None:
    class Own(Loss):
        def count(self, targets: torch.Tensor) -> int:
            return len(targets)

        def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            assert output.dtype == torch.float32
            return output.sum()

    half = torch.ones(3, 2, dtype=torch.bfloat16)
    assert float(summed(Own(), half, torch.zeros(3))) == 6.0

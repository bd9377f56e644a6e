"""Losses as sums and counts, so that any cut of the batch adds up to the same mean."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional

from hetexp.core.errors import ConfigError, must_be
from hetexp.core.instantiate import locate
from hetexp.model.base import WithAuxiliary
from hetexp.training.logits import many_logits
from hetexp.training.logits.many_logits import ManyLogits
from hetexp.training.nonfinite.loss_scale import widened

HALF = (torch.bfloat16, torch.float16)
IGNORED = -100
"""Target that does not count, torch's own default for `cross_entropy`."""


class Loss(ABC):
    """A person's own loss derives from this and is named by its dotted path in `trainer.loss`."""

    takes_half: ClassVar[bool] = False
    """Whether `total` adds up in float32 by itself where the output is of half precision; other losses are
    given it in float32."""

    @abstractmethod
    def count(self, targets: Any) -> float:
        """Return how many elements of the targets the mean is taken over (samples, unmasked tokens …).

        Elements may have weights: then it is the sum of these.
        """

    def counts(self, targets: Any) -> torch.Tensor:
        """Return how many of these elements each sample has, [batch]."""
        rows = [_sample(targets, index) for index in range(num_rows(targets))]
        return torch.tensor([count_of(self, row) for row in rows], dtype=torch.float64)

    @abstractmethod
    def total(self, output: Any, targets: Any) -> torch.Tensor:
        """Return the sum of the loss over these elements, a scalar."""

    def correct(self, output: Any, targets: Any) -> float | None:
        """Return how many elements are predicted right, `None` where that has no meaning.

        The accuracy is this divided by `count`, so that elements have the same weights here.
        """
        return None


class CrossEntropy(Loss):
    """Classification: output [batch, classes] or [batch, seq, classes], targets [batch] or [batch, seq].

    Targets may have dimensions of size 1 besides, as labels in a column do, [batch, 1].
    """

    takes_half = True

    def count(self, targets: torch.Tensor) -> int:
        if targets.device.type == "cpu":  # NumPy begins sooner, and a step waits for it
            return int(np.count_nonzero(targets.numpy() != IGNORED))
        return int((targets != IGNORED).sum())

    def counts(self, targets: torch.Tensor) -> torch.Tensor:
        return (targets != IGNORED).reshape(len(targets), -1).sum(dim=1)

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if targets.is_floating_point():
            fix = "Write trainer.loss=reconstruction, mse or a loss of your own."
            raise ConfigError(
                f"`trainer.loss` cross_entropy needs classes, but the targets are numbers. {fix}"
            )
        rows, wanted = _paired(output, targets)
        if rows.dtype in HALF and rows.numel() > many_logits.CHUNK:
            total: torch.Tensor = ManyLogits.apply(rows, wanted, IGNORED)  # type: ignore[no-untyped-call]
            return total
        return functional.cross_entropy(
            rows.float() if rows.dtype in HALF else rows, wanted, ignore_index=IGNORED, reduction="sum"
        )

    def correct(self, output: torch.Tensor, targets: torch.Tensor) -> int:
        rows, wanted = _paired(output, targets)
        return int(((rows.argmax(dim=-1) == wanted) & (wanted != IGNORED)).sum())


def _paired(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of each prediction, [rows, classes], and its class, [rows].

    Raises:
        ConfigError: the shapes do not say which class belongs to which prediction.
    """
    shape = output.shape[:-1]
    if len(shape) and shape.numel() == targets.numel():
        ends, wanted = _row_ends(shape), _row_ends(targets.shape)
        if ends <= wanted or wanted <= ends:
            return output.flatten(0, -2), targets.flatten()
    shapes = f"{list(output.shape)} and {list(targets.shape)}"
    raise ConfigError(
        "`trainer.loss` cross_entropy needs outputs [batch, …, classes] and one class for each of their rows "
        f"[batch, …], but their shapes are {shapes}."
    )


def _row_ends(shape: Sequence[int]) -> set[int]:
    """Return the products of a shape's first dimensions.

    Two shapes of equally many elements keep the same order where the products of one include the other's.
    """
    return set(accumulate(shape, operator.mul))


class MeanSquaredError(Loss):
    """Regression: output and targets of the same shape; the mean is taken over all elements."""

    def count(self, targets: torch.Tensor) -> int:
        return targets.numel()

    def counts(self, targets: torch.Tensor) -> torch.Tensor:
        return torch.full((len(targets),), targets[0].numel() if len(targets) else 0, dtype=torch.int64)

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if output.shape != targets.shape:  # torch would broadcast them, [n, 1] and [n] to [n, n]
            shapes = f"{list(output.shape)} and {list(targets.shape)}"
            raise ConfigError(
                f"`trainer.loss` mse needs outputs and targets of one shape, but they are {shapes}."
            )
        return functional.mse_loss(output, targets, reduction="sum")


class Reconstruction(Loss):
    """Vectors [batch, …] that are to come out as they went in: the squared error, summed over each sample's
    elements; the mean is taken over samples, as the loss of sparse autoencoders is written.
    """

    def count(self, targets: torch.Tensor) -> int:
        return len(targets)

    def counts(self, targets: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(targets), dtype=torch.int64)

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if output.shape != targets.shape:
            shapes = f"{list(output.shape)} and {list(targets.shape)}"
            raise ConfigError(
                "`trainer.loss` reconstruction needs outputs and targets of one shape, but they are "
                f"{shapes}."
            )
        return functional.mse_loss(output, targets, reduction="sum")


def as_count(value: Any) -> float | None:
    """Return a count as a number of Python's, `None` where no mean can be taken over it."""
    single = hasattr(value, "item") and math.prod(value.shape) == 1
    number = value.item() if single else value
    usable = isinstance(number, (int, float)) and 0 <= number < math.inf  # which NaN is not
    return number if usable else None


def count_of(loss: Loss, targets: Any) -> float:
    """Return over how many elements of the targets the mean is taken.

    Raises:
        ConfigError: the loss gives something else.
    """
    given = loss.count(targets)
    number = as_count(given)
    if number is None:
        key = f"{type(loss).__name__}.count"
        raise ConfigError(must_be(key, "a finite number from 0 on for any targets", given))
    return number


def total_loss(loss: Loss, output: Any, targets: Any) -> torch.Tensor:
    """Return the sum of the loss, a model's own auxiliary loss included (`WithAuxiliary`)."""
    if not isinstance(output, WithAuxiliary):
        return loss.total(output, targets)
    auxiliary = output.auxiliary.float() if output.auxiliary.dtype in HALF else output.auxiliary
    counts = loss.counts(targets).to(auxiliary.device, auxiliary.dtype)
    return loss.total(output.output, targets) + (auxiliary * counts).sum()


def summed(loss: Loss, output: Any, targets: Any) -> torch.Tensor:
    """Return `total_loss`, added up in float32 where the output is of half precision."""
    total: torch.Tensor = widened(total_loss(loss, output if loss.takes_half else widened(output), targets))
    return total


def num_rows(value: Any) -> int:
    """Return the number of samples of a batch's inputs or targets: of the first tensor among them."""
    if isinstance(value, torch.Tensor):
        return len(value)
    return num_rows(next(iter(value.values() if isinstance(value, dict) else value)))


def _sample(value: Any, index: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[index : index + 1]
    if isinstance(value, dict):
        return {key: _sample(item, index) for key, item in value.items()}
    return type(value)(_sample(item, index) for item in value)


_SHIPPED: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropy,
    "mse": MeanSquaredError,
    "reconstruction": Reconstruction,
}


def build_loss(name: str) -> Loss:
    """Return the loss of that name, or an object of the class at that dotted path."""
    loss_class = _SHIPPED.get(name) or locate(name, "trainer.loss")
    loss: Loss = loss_class()
    return loss


def check_loss(name: str) -> list[str]:
    """Return what is wrong with `trainer.loss`, one sentence a problem."""
    try:
        loss = build_loss(name)
    except Exception as error:  # an import runs any code and so raises anything
        reason = str(error).partition("\n")[0]
        return [
            f"`trainer.loss` must be one of {', '.join(_SHIPPED)} or the dotted path of a class, but is "
            f"'{name}' instead ({reason})."
        ]
    if not isinstance(loss, Loss):
        return [
            f"`trainer.loss` must be a class derived from hetexp.training.loss.Loss, but is '{name}' instead."
        ]
    return []

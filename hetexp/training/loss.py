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
    """Base class of losses; the user's own loss is named by its dotted path in `trainer.loss`."""

    takes_half: ClassVar[bool] = False
    """Whether `total` adds up half-precision outputs in float32; other losses get them as float32."""

    @abstractmethod
    def count(self, targets: Any) -> float:
        """Return the number of elements that the mean is taken over (samples, unmasked tokens …).

        If elements have weights, return the sum of the weights.
        """

    def counts(self, targets: Any) -> torch.Tensor:
        """Return the number of these elements of each sample, [batch]."""
        rows = [_sample(targets, index) for index in range(num_rows(targets))]
        return torch.tensor([count_of(self, row) for row in rows], dtype=torch.float64)

    @abstractmethod
    def total(self, output: Any, targets: Any) -> torch.Tensor:
        """Return the sum of the loss over these elements, a scalar."""

    def correct(self, output: Any, targets: Any) -> float | None:
        """Return the number of elements predicted right, `None` if that has no meaning.

        The accuracy is this divided by `count`: elements have the same weights in both.
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
        rows, classes = _paired(output, targets)
        if rows.dtype in HALF and rows.numel() > many_logits.CHUNK:
            total: torch.Tensor = ManyLogits.apply(rows, classes, IGNORED)  # type: ignore[no-untyped-call]
            return total
        return functional.cross_entropy(
            rows.float() if rows.dtype in HALF else rows, classes, ignore_index=IGNORED, reduction="sum"
        )

    def correct(self, output: torch.Tensor, targets: torch.Tensor) -> int:
        rows, classes = _paired(output, targets)
        return int(((rows.argmax(dim=-1) == classes) & (classes != IGNORED)).sum())


def _paired(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of each prediction, [rows, classes], and its class, [rows].

    Raises:
        ConfigError: the shapes do not say which class belongs to which prediction.
    """
    shape = output.shape[:-1]
    if len(shape) and shape.numel() == targets.numel():
        ends, target_ends = _row_ends(shape), _row_ends(targets.shape)
        if ends <= target_ends or target_ends <= ends:
            return output.flatten(0, -2), targets.flatten().long()
    shapes = f"{list(output.shape)} and {list(targets.shape)}"
    raise ConfigError(
        "`trainer.loss` cross_entropy needs outputs [batch, …, classes] and one class for each of their rows "
        f"[batch, …], but their shapes are {shapes}."
    )


def _row_ends(shape: Sequence[int]) -> set[int]:
    """Return the products of a shape's first dimensions.

    Two shapes of equally many elements keep the same order if the products of one include the other's.
    """
    return set(accumulate(shape, operator.mul))


class MeanSquaredError(Loss):
    """Regression: output and targets of the same shape; the mean is taken over all elements."""

    def count(self, targets: torch.Tensor) -> int:
        return targets.numel()

    def counts(self, targets: torch.Tensor) -> torch.Tensor:
        return torch.full((len(targets),), targets[0].numel() if len(targets) else 0, dtype=torch.int64)

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _squared_error(output, targets, "mse")


class Reconstruction(Loss):
    """Autoencoders: the squared error of vectors [batch, …], summed over each sample's elements.

    The mean is taken over samples, as the loss of sparse autoencoders is written.
    """

    def count(self, targets: torch.Tensor) -> int:
        return len(targets)

    def counts(self, targets: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(targets), dtype=torch.int64)

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _squared_error(output, targets, "reconstruction")


def _squared_error(output: torch.Tensor, targets: torch.Tensor, loss: str) -> torch.Tensor:
    if output.shape != targets.shape:  # torch would broadcast them, [n, 1] and [n] to [n, n]
        shapes = f"{list(output.shape)} and {list(targets.shape)}"
        raise ConfigError(
            f"`trainer.loss` {loss} needs outputs and targets of one shape, but they are {shapes}."
        )
    return functional.mse_loss(output, targets, reduction="sum")


def as_count(value: Any) -> float | None:
    """Return a count as a Python number, `None` if no mean can be taken over it."""
    single = hasattr(value, "item") and math.prod(value.shape) == 1
    number = value.item() if single else value
    usable = isinstance(number, (int, float)) and 0 <= number < math.inf  # which NaN is not
    return number if usable else None


def count_of(loss: Loss, targets: Any) -> float:
    """Return the loss's count of the targets.

    Raises:
        ConfigError: the count is no finite number from 0 on.
    """
    count = loss.count(targets)
    number = as_count(count)
    if number is None:
        key = f"{type(loss).__name__}.count"
        raise ConfigError(must_be(key, "a finite number from 0 on for any targets", count))
    return number


def total_loss(loss: Loss, output: Any, targets: Any) -> torch.Tensor:
    """Return the sum of the loss, with the model's auxiliary loss (`WithAuxiliary`)."""
    if not isinstance(output, WithAuxiliary):
        return loss.total(output, targets)
    auxiliary = output.auxiliary.float() if output.auxiliary.dtype in HALF else output.auxiliary
    counts = loss.counts(targets).to(auxiliary.device, auxiliary.dtype)
    return loss.total(output.output, targets) + (auxiliary * counts).sum()


def summed(loss: Loss, output: Any, targets: Any) -> torch.Tensor:
    """Return `total_loss`, added up in float32 if the output is of half precision."""
    total: torch.Tensor = widened(total_loss(loss, output if loss.takes_half else widened(output), targets))
    return total


def num_rows(value: Any) -> int:
    """Return the number of samples of a batch's inputs or targets: the length of the first tensor."""
    if isinstance(value, torch.Tensor):
        return len(value)
    return num_rows(next(iter(value.values() if isinstance(value, dict) else value)))


def _sample(value: Any, index: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[index : index + 1]
    if isinstance(value, dict):
        return {key: _sample(item, index) for key, item in value.items()}
    return type(value)(_sample(item, index) for item in value)


class LabelError(ConfigError):
    """A label is no class of the model's output.

    Args:
        num_classes: of the output.
        ignored: label that does not count.
        label: the wrong one.
        sample: its place in the data, if that is known.
    """

    def __init__(self, num_classes: int, ignored: int, label: int, sample: int | None = None) -> None:
        self.num_classes, self.ignored = num_classes, ignored
        which = "one" if sample is None else f"that of training sample {sample}"
        super().__init__(
            f"`data` labels must be from 0 to {num_classes - 1}, as the model's output has {num_classes} "
            f"classes, but {which} is {label} instead."
        )

    def in_samples(self, microbatches: Sequence[Any], indices: Sequence[Sequence[int]]) -> LabelError:
        """Return the error with the place of the first wrong label in these microbatches, if one has it."""
        for (_, targets), places in zip(microbatches, indices, strict=False):
            if error := label_error(targets, self.num_classes, self.ignored, places):
                return error
        return self


def label_error(
    targets: Any, num_classes: int, ignored: int = IGNORED, places: Sequence[int] = ()
) -> LabelError | None:
    """Return the error of the first label that is no class, `None` if there is none.

    Args:
        targets: a tensor of labels; the labels in other targets are not known.
        places: of the samples in the data.
    """
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.is_complex():
        return None
    wrong = ((targets < 0) | (targets >= num_classes)) & (targets != ignored)
    if not bool(wrong.any()):
        return None
    row = int(wrong.reshape(len(targets), -1).any(1).nonzero()[0])
    sample = places[row] if row < len(places) else None
    return LabelError(num_classes, ignored, int(targets[wrong][0]), sample)


def label_error_of(loss: Loss, output: Any, targets: Any, places: Sequence[int] = ()) -> LabelError | None:
    """Return `label_error` for the classes of a model's output."""
    output = output.output if isinstance(output, WithAuxiliary) else output
    if not isinstance(output, torch.Tensor) or not output.dim():
        return None
    num_classes = output.shape[getattr(loss, "class_dim", -1)]
    return label_error(targets, num_classes, getattr(loss, "ignore_index", IGNORED), places)


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
    """Return the problems of `trainer.loss`, one sentence each."""
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

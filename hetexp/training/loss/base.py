"""Losses as sums and counts, so that any cut of the batch adds up to the same mean; the default loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import NonNegativeFloat
from torch.nn import functional

from hetexp.core.errors import ConfigError, must_be
from hetexp.model.base import WithAuxiliary
from hetexp.training.logits import many_logits
from hetexp.training.logits.many_logits import ManyLogits
from hetexp.training.loss.labels import LabelError, wrong_labels
from hetexp.training.loss.parts import Key, output_part, target_part
from hetexp.training.loss.shapes import DoubtError, class_dim
from hetexp.training.nonfinite.loss_scale import widened

HALF = (torch.bfloat16, torch.float16)
IGNORED = -100
"""Target that does not count, torch's own default for `cross_entropy`."""


class Loss(ABC):
    """Base class of losses; the user's own loss is named by its dotted path in `trainer.loss`."""

    takes_half: ClassVar[bool] = False
    """Whether `total` adds up half-precision outputs in float32; other losses get them as float32."""
    targets_on_host: ClassVar[bool] = False
    """Whether `total` gets the targets on the host instead of the output's device."""
    num_terms: int = 0
    """Number of means that the loss consists of, if each has a count of its own."""
    seen_dim: int | None = None
    """Dimension of the classes in a batch whose shapes left no doubt; the same on every rank."""

    @abstractmethod
    def count(self, targets: Any) -> float:
        """Return the number of elements that the mean is taken over (samples, unmasked tokens …).

        If elements have weights, return the sum of the weights.
        """

    def for_samples(self, num_samples: int | None) -> Loss:
        """Return the loss for a microbatch of so many samples, which its targets need not show.

        It returns itself unless it counts samples, and their number is known (neither `None` nor 0).
        """
        return self

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

    def check(self, output: Any, targets: Any) -> None:  # noqa: B027 - most losses read any values
        """Check the values of targets on the host, before a device other than the CPU reads them.

        Raises:
            ConfigError: the device would fail without saying why.
        """

    def term_counts(self, targets: Any) -> Sequence[float]:
        """Return the count of each term, `num_terms` numbers."""
        return ()

    def set_global_counts(self, count: float, term_counts: Sequence[float]) -> None:  # noqa: B027
        """Divide the terms by these counts of all ranks' samples until further notice.

        Args:
            count: the sum of all ranks' `count`; 0: divide them by each batch's own counts.
            term_counts: the sum of all ranks' `term_counts`.
        """

    def sums(self, output: Any, targets: Any) -> list[float]:
        """Return what `mean` needs of these elements: the sum of the loss, or of each term.

        Raises:
            NoLossError: the model returned none.
        """
        return [float(summed(self, output, targets).detach())]

    def mean(self, sums: Sequence[float], count: float, term_counts: Sequence[float]) -> float:
        """Return the mean loss of the added-up `sums`, `count` and `term_counts`; NaN if nothing counts."""
        return sums[0] / count if count else math.nan


class NoLossError(ConfigError):
    """The model returned no loss, as some models do in evaluation."""


class ReadyLoss(Loss):
    """A shipped loss of one output tensor and one target tensor.

    Args:
        output: name or number of the model's output that the loss takes, if there are several.
        target: name or number of the targets that it takes, if there are several.
    """

    takes_half = True
    name: ClassVar[str]

    def __init__(self, output: Key | None = None, target: Key | None = None) -> None:
        self.output, self.target = output, target

    def picked(self, output: Any) -> torch.Tensor:
        """Return the output tensor that the loss takes.

        Raises:
            ConfigError: there are several, and none is named.
        """
        if isinstance(output, torch.Tensor) and self.output is None:
            return output
        return output_part(output, self.output)

    def wanted(self, targets: Any) -> torch.Tensor:
        """Return the target tensor that the loss takes.

        Raises:
            ConfigError: there are several, and none is named.
        """
        if isinstance(targets, torch.Tensor) and self.target is None:
            return targets
        return target_part(targets, self.target)


class CrossEntropy(ReadyLoss):
    """Classification: output [batch, …, classes] or [batch, classes, …], targets [batch, …].

    Targets are classes, integers of any type. They may have dimensions of size 1 besides, as labels in a
    column do, [batch, 1]. Targets of the output's shape are each class's probability.

    Args:
        weight: of each class. The mean is then taken over the weights of the labels, as torch's is.
        label_smoothing: part of each label that is shared by all classes.
        ignore_index: label that does not count.
        class_dim: the output's dimension of the classes; `None`: by the shapes.
        output: name or number of the model's output that the loss takes, if there are several.
        target: name or number of the targets that it takes, if there are several.
    """

    name = "cross_entropy"

    def __init__(
        self,
        weight: list[NonNegativeFloat] | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = IGNORED,
        class_dim: int | None = None,
        output: Key | None = None,
        target: Key | None = None,
    ) -> None:
        super().__init__(output, target)
        self.weight = None if weight is None else torch.tensor(weight, dtype=torch.float64)
        self.label_smoothing, self.ignore_index, self.class_dim = label_smoothing, ignore_index, class_dim

    def wanted(self, targets: Any) -> torch.Tensor:
        labels = super().wanted(targets)
        whole = labels.dtype == torch.int64 or labels.is_floating_point()
        return labels if whole else labels.long()  # as a byte, -100 would be 156

    # ------------------------------------------------------------ counts

    def count(self, targets: Any) -> float:
        labels = self.wanted(targets)
        if labels.is_floating_point():
            return self._checked(labels).numel() // labels.shape[self._soft_dim(labels)]
        if self.weight is not None:
            return float(self._weights_of(labels).sum())
        if labels.device.type == "cpu":  # NumPy begins sooner, and a step waits for it
            return int(np.count_nonzero(labels.numpy() != self.ignore_index))
        return int((labels != self.ignore_index).sum())

    def counts(self, targets: Any) -> torch.Tensor:
        labels = self.wanted(targets)
        if labels.is_floating_point():
            rows = labels[0].numel() // labels.shape[self._soft_dim(labels)] if len(labels) else 0
            return torch.full((len(labels),), rows, dtype=torch.int64)
        counted = labels != self.ignore_index if self.weight is None else self._weights_of(labels)
        return counted.reshape(len(labels), -1).sum(dim=1)

    def _weights_of(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the weight of each label in float64, 0 if it is ignored."""
        assert self.weight is not None
        counted = labels != self.ignore_index
        classes = labels.where(counted, 0)
        if classes.device.type == "cpu" and classes.numel():
            self._check_range(labels, len(self.weight))
        weights = self.weight.to(classes.device)[classes]
        return weights.where(counted, 0.0)

    # ------------------------------------------------------------ sums

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        scores, labels = self.picked(output), self.wanted(targets)
        if labels.is_floating_point():
            return self._soft(scores, labels)
        rows, classes = self._paired(scores, labels)
        plain = self.weight is None and not self.label_smoothing
        if plain and rows.dtype in HALF and rows.ndim == 2 and rows.numel() > many_logits.CHUNK:
            total: torch.Tensor = ManyLogits.apply(rows, classes, self.ignore_index)  # type: ignore[no-untyped-call]
            return total
        try:
            return functional.cross_entropy(
                rows.float() if rows.dtype in HALF else rows,
                classes,
                None if self.weight is None else self._weights_for(rows),
                ignore_index=self.ignore_index,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            )
        except IndexError:
            self._check_range(classes, rows.shape[1])
            raise

    def correct(self, output: Any, targets: Any) -> float:
        scores, labels = self.picked(output), self.wanted(targets)
        if labels.is_floating_point():
            dim = self._soft_dim(labels)
            return int((scores.argmax(dim) == labels.argmax(dim)).sum())
        rows, classes = self._paired(scores, labels)
        right = (rows.argmax(dim=1) == classes) & (classes != self.ignore_index)
        if self.weight is None:
            return int(right.sum())
        return float(self.weight.to(classes.device)[classes[right]].sum())

    def check(self, output: Any, targets: Any) -> None:
        labels, scores = self.wanted(targets), self.picked(output)
        if labels.device.type == "cpu" and not labels.is_floating_point():
            self._check_range(labels, scores.shape[self._dim(scores, labels)])

    def _paired(self, scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of each prediction, [rows, classes] or [batch, classes, …], and its class."""
        dim = self._dim(scores, labels)
        if dim == scores.ndim - 1:
            return scores.flatten(0, -2), labels.flatten()
        rows = scores.movedim(dim, 1)
        return rows, labels.reshape(rows.shape[:1] + rows.shape[2:])

    def _dim(self, scores: torch.Tensor, labels: torch.Tensor) -> int:
        shape = scores.shape
        if self.class_dim is None and len(shape) == 2 and labels.shape == shape[:1] and shape[1] > 1:
            return 1
        try:
            dim = class_dim(shape, labels.shape, self.class_dim)
        except DoubtError:
            if self.seen_dim is None:
                raise
            return self.seen_dim % len(shape)
        if len(shape) > 2:  # batches of other lengths may leave a doubt that this one does not
            self.seen_dim = -1 if dim == len(shape) - 1 else dim
        return dim

    def _weights_for(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        if len(self.weight) != rows.shape[1]:
            accepted = f"a list of {rows.shape[1]} numbers, one for each class of the output"
            raise ConfigError(must_be("loss.weight", accepted, self.weight.tolist()))
        return self.weight.to(rows.device, torch.float32 if rows.dtype in HALF else rows.dtype)

    def _check_range(self, labels: torch.Tensor, num_classes: int) -> None:
        """Check labels on the host, or on a device that has failed already."""
        wrong = wrong_labels(labels, num_classes, self.ignore_index)
        if bool(wrong.any()):
            raise LabelError(self.wanted, num_classes, self.ignore_index, int(labels[wrong][0]))

    # ------------------------------------------------------------ probabilities of classes as targets

    def _soft(self, scores: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        dim = self._soft_dim(self._checked(probabilities))
        if scores.shape != probabilities.shape:
            shapes = f"{list(scores.shape)} and {list(probabilities.shape)}"
            raise ConfigError(
                "`trainer.loss` cross_entropy needs outputs and probabilities of one shape, but they are "
                f"{shapes}."
            )
        rows = scores.float() if scores.dtype in HALF else scores
        rows = rows.movedim(dim, 1)
        return functional.cross_entropy(
            rows,
            probabilities.movedim(dim, 1).to(rows.dtype),
            None if self.weight is None else self._weights_for(rows),
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def _soft_dim(self, probabilities: torch.Tensor) -> int:
        num_dims = probabilities.ndim
        if num_dims == 2:
            return 1
        if num_dims > 2 and self.class_dim is not None:
            return self.class_dim % num_dims
        if num_dims > 2:
            fix = f"The targets are probabilities {list(probabilities.shape)}."
            raise ConfigError(must_be("loss.class_dim", "the dimension of the classes", None, fix))
        raise _no_classes()

    def _checked(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Refuse numbers on the host that are no probabilities: a regression would train, but wrongly."""
        dim = self._soft_dim(probabilities)
        if probabilities.device.type == "cpu" and probabilities.numel():
            sums = probabilities.sum(dim)
            if bool((probabilities < 0).any()) or not bool(((sums - 1).abs() < 1e-2).all()):
                raise _no_classes()
        return probabilities


def _no_classes() -> ConfigError:
    fix = "Write trainer.loss=reconstruction, mse, bce or a loss of your own."
    return ConfigError(
        f"`trainer.loss` cross_entropy needs classes, but the targets are numbers. {fix} Probabilities of "
        "the classes must add up to 1 for each prediction."
    )


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


def batch_counts(
    loss: Loss, targets: Iterable[Any], sizes: Iterable[int | None]
) -> tuple[float, list[float]]:
    """Return the loss's count of some batches of so many samples, and the count of each of its terms.

    Raises:
        ConfigError: a count is no finite number from 0 on.
    """
    count: float = 0
    terms: list[float] = [0] * loss.num_terms
    for batch, size in zip(targets, sizes, strict=True):
        of_batch = loss.for_samples(size)
        count += count_of(of_batch, batch)
        if terms:
            terms = [a + b for a, b in zip(terms, of_batch.term_counts(batch), strict=True)]
    return count, terms


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

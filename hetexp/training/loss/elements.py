"""Losses of numbers: outputs and targets of one shape, a mean over all elements or over samples."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch.nn import functional

from hetexp.core.errors import ConfigError
from hetexp.training.loss.base import HALF, ReadyLoss
from hetexp.training.loss.parts import Key
from hetexp.training.loss.shapes import matched, one_each


class Elementwise(ReadyLoss):
    """A mean over all elements; output and targets have one shape, but for dimensions of size 1."""

    def count(self, targets: Any) -> float:
        return self.wanted(targets).numel()

    def counts(self, targets: Any) -> torch.Tensor:
        targets = self.wanted(targets)
        return torch.full((len(targets),), targets[0].numel() if len(targets) else 0, dtype=torch.int64)

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        numbers = self.picked(output)
        numbers = numbers.float() if numbers.dtype in HALF else numbers
        return self.sum(numbers, matched(numbers, self.wanted(targets), self.name))

    @abstractmethod
    def sum(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum over the elements of tensors of one shape."""


class MeanSquaredError(Elementwise):
    """Regression: the squared error, a mean over all elements.

    Args:
        output: name or number of the model's output that the loss takes, if there are several.
        target: name or number of the targets that it takes, if there are several.
    """

    name = "mse"

    def sum(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, targets, reduction="sum")


class MeanAbsoluteError(Elementwise):
    """Regression: the absolute error, a mean over all elements."""

    name = "mae"

    def sum(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.l1_loss(output, targets, reduction="sum")


class Huber(Elementwise):
    """Regression: squared errors below `delta`, and absolute ones above; a mean over all elements.

    Args:
        delta: error from which on it counts linearly.
        output: name or number of the model's output that the loss takes, if there are several.
        target: name or number of the targets that it takes, if there are several.
    """

    name = "huber"

    def __init__(
        self, delta: PositiveFloat = 1.0, output: Key | None = None, target: Key | None = None
    ) -> None:
        super().__init__(output, target)
        self.delta = delta

    def sum(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.huber_loss(output, targets, reduction="sum", delta=self.delta)


class Reconstruction(Elementwise):
    """Autoencoders: the squared error of vectors [batch, …], summed over each sample's elements.

    The mean is taken over samples, as the loss of sparse autoencoders is written.
    """

    name = "reconstruction"

    def count(self, targets: Any) -> float:
        return len(self.wanted(targets))

    def counts(self, targets: Any) -> torch.Tensor:
        return torch.ones(len(self.wanted(targets)), dtype=torch.int64)

    def sum(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, targets, reduction="sum")


class BinaryCrossEntropy(Elementwise):
    """Yes or no for each element: outputs are logits, targets 0, 1 or probabilities of the same shape.

    Args:
        weight: of each class, by which its loss is multiplied; the mean is over all elements, as torch's is.
        pos_weight: by which the loss of positive targets is multiplied: a number, or one of each class.
        class_dim: the output's dimension of the classes, if the shapes leave a doubt.
        output: name or number of the model's output that the loss takes, if there are several.
        target: name or number of the targets that it takes, if there are several.
    """

    name = "bce"

    def __init__(
        self,
        weight: list[NonNegativeFloat] | None = None,
        pos_weight: NonNegativeFloat | list[NonNegativeFloat] | None = None,
        class_dim: int | None = None,
        output: Key | None = None,
        target: Key | None = None,
    ) -> None:
        super().__init__(output, target)
        self.weight = None if weight is None else torch.tensor(weight, dtype=torch.float64)
        self.pos_weight = None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float64)
        self.class_dim = class_dim

    def count(self, targets: Any) -> int:
        targets = self.wanted(targets)
        if targets.device.type == "cpu" and targets.numel() and targets.dtype != torch.bool:
            least, most = float(targets.min()), float(targets.max())
            if not (least >= 0 and most <= 1):  # NaN is neither
                raise ConfigError(
                    f"`trainer.loss` bce needs targets from 0 to 1, but they are from {least:g} to {most:g}."
                )
        return int(targets.numel())

    def sum(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weights = []
        for key, values in (("loss.weight", self.weight), ("loss.pos_weight", self.pos_weight)):
            if values is not None:
                values = one_each(values.to(output.device, output.dtype), output, key, self.class_dim)
            weights.append(values)
        weight, pos_weight = weights
        return functional.binary_cross_entropy_with_logits(
            output, targets, weight, reduction="sum", pos_weight=pos_weight
        )

    def correct(self, output: Any, targets: Any) -> float:
        numbers = self.picked(output)
        wanted = matched(numbers, self.wanted(targets), self.name)
        return int(((numbers > 0) == (wanted > 0.5)).sum())

"""Which number of an output belongs to which target: nothing is broadcast."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch

from hetexp.core.errors import ConfigError, must_be


class DoubtError(ConfigError):
    """The classes may stand in the last dimension or in the second one."""


def class_dim(shape: Sequence[int], targets: Sequence[int], given: int | None) -> int:
    """Return the dimension of the classes in an output, from 0 on.

    Args:
        shape: of the output.
        targets: shape of the labels, one for each prediction.
        given: the dimension, if the user has named it.

    Raises:
        DoubtError: the labels fit the classes in either place.
        ConfigError: the shapes do not say which label belongs to which prediction.
    """
    shapes = f"{list(shape)} and {list(targets)}"
    num_dims = len(shape)
    if shape[:1] == targets[:1] == torch.Size([0]):  # an empty batch has the dimensions of any other
        shape, targets = (2, *shape[1:]), (2, *targets[1:])
    last = num_dims > 1 and _same_order(shape[:-1], targets)
    first = num_dims > 2 and _without_ones((shape[0], *shape[2:])) == _without_ones(targets)
    if given is not None:
        dim = given % num_dims if -num_dims <= given < num_dims else 0
        fits = last if dim == num_dims - 1 else _others(shape, dim) == _without_ones(targets)
        if not dim or not fits:
            accepted = f"a dimension of the output whose others are those of the labels ({shapes})"
            raise ConfigError(must_be("loss.class_dim", accepted, given))
    elif last and first:
        why = f"Outputs and labels of shapes {shapes} fit either way."
        raise DoubtError(must_be("loss.class_dim", "-1 (the last) or 1", None, why))
    elif not last and not first:
        one_hot = list(shape) == list(targets)
        fix = " One-hot labels become classes by argmax(-1), and probabilities by float()." if one_hot else ""
        raise ConfigError(
            "`trainer.loss` cross_entropy needs outputs [batch, …, classes] or [batch, classes, …] and one "
            f"label for each prediction, [batch, …], but their shapes are {shapes}.{fix}"
        )
    else:
        dim = num_dims - 1 if last else 1
    if shape[dim] == 1:
        raise ConfigError(
            "`trainer.loss` cross_entropy needs outputs with a number for each of two classes or more, but "
            f"their shape is {list(shape)}. For a single number write trainer.loss=bce."
        )
    return dim


def matched(output: torch.Tensor, targets: torch.Tensor, loss: str) -> torch.Tensor:
    """Return targets in the output's shape and type; they may differ in dimensions of size 1.

    Raises:
        ConfigError: their shapes differ in more; torch would broadcast [n, 1] and [n, 2] to [n, 2].
    """
    if output.shape != targets.shape:
        same_samples = output.shape[:1] == targets.shape[:1]
        if not same_samples or _without_ones(output.shape) != _without_ones(targets.shape):
            shapes = f"{list(output.shape)} and {list(targets.shape)}"
            raise ConfigError(
                f"`trainer.loss` {loss} needs outputs and targets of one shape, but they are {shapes}."
            )
        targets = targets.reshape(output.shape)
    return targets if targets.is_floating_point() else targets.to(output.dtype)


def one_each(values: torch.Tensor, output: torch.Tensor, key: str, dim: int | None) -> torch.Tensor:
    """Return numbers of the last dimension, or of each class, in a shape that multiplies an output.

    Args:
        values: [n], or [] for all elements.
        key: for the message.
        dim: the output's dimension of these numbers; `None`: by its shape.

    Raises:
        ConfigError: the output has no such dimension, or several.
    """
    if values.ndim == 0 or len(values) == 1:
        return values
    count, shape = len(values), output.shape
    fitting = [place for place, size in enumerate(shape) if place in (1, len(shape) - 1) and size == count]
    if dim is not None and -len(shape) <= dim < len(shape):
        fitting = [dim % len(shape)] if shape[dim] == count else []
    if len(fitting) > 1:
        why = f"{count} numbers fit two dimensions of the output {list(shape)}."
        raise ConfigError(must_be("loss.class_dim", "-1 (the last) or 1", None, why))
    if not fitting:
        accepted = f"as many numbers as the output {list(shape)} has classes"
        raise ConfigError(must_be(key, accepted, values.tolist()))
    return values.view([count if place == fitting[0] else 1 for place in range(len(shape))])


def _same_order(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes have the same elements in the same order, split into dimensions or not."""
    if torch.Size(shape).numel() != torch.Size(other).numel():
        return False
    ends, others = _row_ends(shape), _row_ends(other)
    return ends <= others or others <= ends


def _row_ends(shape: Sequence[int]) -> set[int]:
    """Return the products of a shape's first dimensions.

    Two shapes of equally many elements keep the same order if the products of one include the other's.
    """
    return set(accumulate(shape, operator.mul))


def _others(shape: Sequence[int], dim: int) -> list[int]:
    return _without_ones((*shape[:dim], *shape[dim + 1 :]))


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]

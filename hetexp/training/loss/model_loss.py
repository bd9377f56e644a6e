"""The loss that a model returns by itself: a mean, whose count the labels give."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hetexp.core.errors import ConfigError, must_be
from hetexp.core.instantiate import locate
from hetexp.torch_private import tree_leaves
from hetexp.training.loss.base import HALF, IGNORED, Loss, NoLossError, num_rows
from hetexp.training.loss.parts import TARGETS, Key, part

COUNTS = ("samples", "labels", "shifted_labels")


class ModelLoss(Loss):
    """Takes the loss that the model returns: `loss` of its output, the first of a tuple, or a sum of a dict.

    The model's loss is a mean. The sum is that mean times the count of its elements.

    Args:
        count: what the mean is taken over. `samples`; `labels`, those that do not hold `ignore_index`;
            `shifted_labels`, the same without the first of each sequence, as causal language models have it;
            or the dotted path of a function that returns the count of a batch's targets.
        ignore_index: label that does not count.
        target: name or number of the labels in the targets; `None`: `labels`, `label`, or the only tensor.
    """

    takes_half = True
    targets_on_host = True

    def __init__(
        self, count: str | None = None, ignore_index: int = IGNORED, target: Key | None = None
    ) -> None:
        self._count, self._ignore_index, self._target = count, ignore_index, target
        self._num_samples: int | None = None
        """Of a microbatch; `None`: as many as the targets have rows."""
        self._function = None if count is None or count in COUNTS else locate(count, "loss.count")

    @staticmethod
    def check_arguments(count: str | None = None, **_: Any) -> list[str]:
        """Return the problems of the arguments, one sentence each."""
        if count is None or count in COUNTS:
            return []
        try:
            found = locate(count, "loss.count")
        except ConfigError as error:
            return error.problems
        except Exception as error:  # an import runs any code and so raises anything
            reason = f"It cannot be imported ({str(error).partition(chr(10))[0]})."
            return [must_be("loss.count", f"one of {_CHOICES}", count, reason)]
        return [] if callable(found) else [must_be("loss.count", f"one of {_CHOICES}", count)]

    def for_samples(self, num_samples: int | None) -> ModelLoss:
        if not num_samples or self._count != "samples":
            return self
        loss = copy.copy(self)
        loss._num_samples = num_samples
        return loss

    def counts(self, targets: Any) -> torch.Tensor:
        if self._count == "samples":
            return torch.ones(int(self.count(targets)), dtype=torch.int64)
        return super().counts(targets)

    def count(self, targets: Any) -> float:
        if self._function is not None:
            count: float = self._function(targets)
            return count
        if self._count == "samples":
            return self._num_samples or num_rows(targets)
        labels = self._labels(targets)
        if self._count is None and _num_dims(labels) > 1:
            shape = f"The labels are {list(labels.shape)} {str(labels.dtype).removeprefix('torch.')}."
            raise ConfigError(must_be("loss.count", f"one of {_CHOICES}", None, shape))
        if self._count == "shifted_labels":
            labels = labels[..., 1:]
        return labels.numel() if labels.is_floating_point() else int((labels != self._ignore_index).sum())

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        mean = loss_of(output)
        if any(t.is_meta for t in _tensors(targets)):  # only memory is estimated
            return mean * 1.0
        count = self.count(targets)
        return mean * count if count else _nothing(output, mean)

    def _labels(self, targets: Any) -> torch.Tensor:
        if self._target is not None:
            labels = part(targets, self._target, "loss.target")
        elif isinstance(targets, Mapping):
            labels = next((targets[name] for name in TARGETS if name in targets), None)
        else:
            labels = targets
        if isinstance(labels, torch.Tensor):
            return labels
        names = f" of the keys {', '.join(map(str, targets))}" if isinstance(targets, Mapping) else ""
        why = f"The targets{names} hold no tensor `labels` to count; loss.target names another key."
        accepted = "samples or the dotted path of a function"
        raise ConfigError(must_be("loss.count", accepted, self._count, why))


_CHOICES = f"{', '.join(COUNTS)}, or the dotted path of a function of the targets"


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that a model has returned, a scalar, at least in float32.

    Raises:
        NoLossError: there is none.
        ConfigError: it is no scalar.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
        losses = list(output.values())
        if "loss" not in output and losses and all(_is_scalar(value) for value in losses):
            found = torch.stack([value.float() if value.dtype in HALF else value for value in losses]).sum()
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return (found.float() if found.dtype in HALF else found).reshape(())
    kind = type(output).__qualname__
    if isinstance(found, torch.Tensor):
        raise NoLossError(
            "`trainer.loss` model needs a model that returns its loss as one number, but in the output (a "
            f"{kind}) its shape is {list(found.shape)}."
        )
    raise NoLossError(
        "`trainer.loss` model needs a model that returns its loss, as `loss` of its output, as the first of "
        f"a tuple or as a dict of losses, but the output (a {kind}) holds none. Does it get its labels?"
    )


def _nothing(output: Any, mean: torch.Tensor) -> torch.Tensor:
    """Return a zero whose gradients are zero: the mean over nothing is NaN, and so is NaN × 0.

    The zero goes through the model's finite outputs, since ranks may wait for each other in its layers.
    """
    finite = [t for t in (mean, *_tensors(output)) if t.requires_grad and bool(t.isfinite().all())]
    zero = torch.zeros((), dtype=mean.dtype, device=mean.device)
    return torch.stack([(t * 0.0).sum().to(zero) for t in finite]).sum() if finite else zero


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if not isinstance(value, (Mapping, tuple, list, torch.Tensor)) and hasattr(value, "__dict__"):
        value = list(vars(value).values())
    elif isinstance(value, Mapping):
        value = dict(value)
    yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def _num_dims(labels: torch.Tensor) -> int:
    return sum(size != 1 for size in labels.shape)

"""The error of a label that is no class, with its place in the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetexp.core.errors import ConfigError


class LabelError(ConfigError):
    """A label is no class of the model's output.

    Args:
        wanted: returns the labels of a microbatch's targets.
        num_classes: of the output.
        ignored: label that does not count.
        label: the wrong one.
        sample: its place in the data, if that is known.
    """

    def __init__(
        self,
        wanted: Callable[[Any], torch.Tensor],
        num_classes: int,
        ignored: int,
        label: int,
        sample: int | None = None,
    ) -> None:
        self._wanted, self._num_classes, self._ignored = wanted, num_classes, ignored
        which = "one" if sample is None else f"that of training sample {sample}"
        super().__init__(
            f"`data` labels must be from 0 to {num_classes - 1}, as the model's output has {num_classes} "
            f"classes, or {ignored} if they do not count, but {which} is {label} instead."
        )

    def in_samples(self, microbatches: Sequence[Any], indices: Sequence[Sequence[int]]) -> LabelError:
        """Return the error with the place of the first wrong label in these microbatches, if one has it."""
        for (_, targets), places in zip(microbatches, indices, strict=False):
            labels = self._wanted(targets)
            wrong = wrong_labels(labels, self._num_classes, self._ignored)
            rows = wrong.reshape(len(labels), -1).any(1).nonzero()
            if len(rows) and int(rows[0]) < len(places):
                label = int(labels[wrong][0])
                place = places[int(rows[0])]
                return LabelError(self._wanted, self._num_classes, self._ignored, label, place)
        return self


def wrong_labels(labels: torch.Tensor, num_classes: int, ignored: int) -> torch.Tensor:
    """Return which labels are no class, in the labels' shape."""
    return ((labels < 0) | (labels >= num_classes)) & (labels != ignored)

"""The shipped functions that make a batch of samples which torch's `default_collate` cannot stack."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import PositiveInt
from torch.utils.data import default_collate

from hetexp.core.errors import ConfigError, must_be
from hetexp.data.padded import IGNORED

TARGETS = ("labels", "label", "targets", "target")
"""Names of parts whose integers are padded with a label that does not count."""


def collate_list(samples: list[Any]) -> Any:
    """Return lists of the samples' parts, as they are: a tuple or a dict of lists with one entry a sample.

    Samples without parts give one list, as both inputs and targets.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: [sample[key] for sample in samples] for key in first}
    if isinstance(first, tuple):
        return tuple(map(list, zip(*samples, strict=True)))
    return samples, samples


class Pad:
    """Stacks tensors of different length, each padded at its end to the longest of the batch.

    Lists of numbers become tensors. Keys are the names of a sample's parts, or the positions "0" and "1" of
    `(inputs, targets)`.

    Args:
        values: what the padding holds: a number, or a number a key. By default 0, and for integers that are
            targets the label that does not count in `trainer.loss` (`loss.ignore_index`, else -100).
        mask: name of an input that says which elements are real, 1, and which padding, 0; `None`: none.
        mask_type: type of the mask.
        length: length of every batch, for devices that need samples of one shape; `None`: that of its longest
            sample.
        keys: keys of what is padded; `None`: all tensors with a dimension.
    """

    def __init__(
        self,
        values: float | dict[str, float] | None = None,
        mask: str | None = None,
        mask_type: Literal["int64", "bool"] = "int64",
        length: PositiveInt | None = None,
        keys: list[str] | None = None,
    ) -> None:
        self.length, self.targets = length, set(TARGETS)
        self.ignored: Sequence[int] = (IGNORED,)
        """Labels that do not count in the loss: several if it is a sum of losses that differ in them."""
        self._values, self._mask, self._keys = values, mask, keys
        self._mask_dtype = torch.bool if mask_type == "bool" else torch.int64

    @property
    def has_mask(self) -> bool:
        """Whether a mask shows what is padding."""
        return self._mask is not None

    def __call__(self, samples: list[Any]) -> Any:
        """Return the samples as one batch.

        Raises:
            ConfigError: the samples cannot be padded, or a value is needed that is not known.
        """
        first = samples[0]
        if isinstance(first, (tuple, list)) and not _is_row(first):
            inputs = self._batch([sample[0] for sample in samples], "0")
            rest = [self._batch([s[n] for s in samples], str(n)) for n in range(1, len(first))]
            return (self._masked(inputs, [sample[0] for sample in samples]), *rest)
        return self._masked(self._batch(samples, ""), samples)

    def _batch(self, parts: list[Any], key: str) -> Any:
        first = parts[0]
        if isinstance(first, Mapping):
            return {name: self._batch([part[name] for part in parts], str(name)) for name in first}
        if isinstance(first, (tuple, list)) and not _is_row(first):
            return tuple(self._batch(list(column), key) for column in zip(*parts, strict=True))
        rows = [_as_tensor(part) for part in parts]
        if all(isinstance(row, torch.Tensor) and row.dim() for row in rows) and self._pads(key):
            return self._stacked(rows, key)
        return default_collate(rows)

    def _pads(self, key: str) -> bool:
        return self._keys is None or key in self._keys

    def _stacked(self, rows: list[torch.Tensor], key: str) -> torch.Tensor:
        """Return [batch, length, …], of rows [any length, …]."""
        lengths = [len(row) for row in rows]
        length = self._longest(lengths, key)
        if set(lengths) == {length}:
            return torch.stack(rows)
        batch = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), self._value(rows[0], key))
        for place, row in zip(batch, rows, strict=True):
            place[: len(row)] = row
        return batch

    def _longest(self, lengths: Sequence[int], key: str) -> int:
        longest = max(lengths)
        if self.length is None:
            return longest
        if longest > self.length:
            accepted = f"at least {longest}, the length of a sample's {_shown(key)}"
            raise ConfigError(must_be("data.collate.length", accepted, self.length, "Or cut the samples."))
        return self.length

    def _value(self, row: torch.Tensor, key: str) -> float:
        """Return what a key's padding holds.

        Raises:
            ConfigError: numbers of targets: each value counts in the loss.
        """
        if isinstance(self._values, Mapping):
            if key in self._values:
                return self._values[key]
        elif self._values is not None:
            return self._values
        if key not in self.targets and key != "1":
            return 0
        if row.dtype.is_signed and not row.is_floating_point() and not row.is_complex():
            if len(self.ignored) == 1:
                return self.ignored[0]
            labels = ", ".join(map(str, self.ignored))
            accepted = f"given if the terms of the loss ignore different labels ({labels})"
            raise ConfigError(must_be(f"data.collate.values.{key}", accepted, None))
        accepted = f"given if {_shown(key)} of {str(row.dtype).removeprefix('torch.')} differ in length"
        fix = "All their elements count, in mse too: choose a value that your own loss leaves out."
        raise ConfigError(must_be(f"data.collate.values.{key}", accepted, None, fix))

    def _masked(self, inputs: Any, samples: list[Any]) -> Any:
        """Return the inputs with the mask among them.

        Raises:
            ConfigError: the inputs have no names, or the mask's name already.
        """
        if self._mask is None:
            return inputs
        if not isinstance(inputs, Mapping):
            fix = "Give samples whose inputs are a dict: the model gets the mask by its name."
            raise ConfigError(must_be("data.collate.mask", "null if inputs have no names", self._mask, fix))
        if self._mask in inputs:
            accepted = f"a name that samples do not have ({', '.join(map(str, inputs))})"
            raise ConfigError(must_be("data.collate.mask", accepted, self._mask))
        names = [n for n in inputs if str(n) not in self.targets and self._pads(str(n))]
        for name in names:
            rows = [_as_tensor(sample[name]) for sample in samples]
            if all(isinstance(row, torch.Tensor) and row.dim() for row in rows):
                lengths = torch.tensor([len(row) for row in rows])
                places = torch.arange(inputs[name].shape[1])
                return {**inputs, self._mask: (places < lengths[:, None]).to(self._mask_dtype)}
        raise ConfigError(must_be("data.collate.mask", "null if no input is padded", self._mask))


def _is_row(value: Any) -> bool:
    """Return whether a list or a tuple is a row of numbers, not the parts of a sample.

    Rows of data sets (`datasets` of Hugging Face, JSON) are lists; a tuple has parts.
    """
    if not isinstance(value, list):
        return False
    first = value
    while isinstance(first, list):
        if not first:
            return True
        first = first[0]
    return isinstance(first, numbers.Number)


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    return torch.tensor(value) if isinstance(value, list) and _is_row(value) else value


def _shown(key: str) -> str:
    names = {"": "tensor", "0": "inputs", "1": "targets"}
    return names.get(key, f"`{key}`")

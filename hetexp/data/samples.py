"""From samples to batches `(inputs, targets)`: the one owner of the keys `data.inputs`, `targets`, `collate`.

All who draw samples get a `Collate` from the data source and know nothing of the form of samples.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from hetexp.core.config.samples import COLLATE, Key
from hetexp.core.errors import ConfigError, did_you_mean, must_be
from hetexp.core.instantiate import instantiate, locate
from hetexp.data.collate import Pad, collate_list

Function = Callable[[list[Any]], Any]
_Keys = Key | list[Key] | None


class Microbatch(tuple[Any, Any]):
    """A pair `(inputs, targets)` that only its collate function can cut: not every tensor has a row a sample.

    A part is collated again of its samples, which are read again.
    """

    indices: Sequence[int]
    """Of the samples."""
    load: Callable[[Sequence[int]], Microbatch]
    """Returns the batch of samples with these indices."""

    @classmethod
    def of(
        cls, pair: tuple[Any, Any], indices: Sequence[int], load: Callable[[Sequence[int]], Microbatch]
    ) -> Microbatch:
        """Return a pair with the indices of its samples."""
        batch = cls(pair)
        batch.indices, batch.load = indices, load
        return batch

    def part(self, start: int, end: int) -> Microbatch:
        """Return the samples `[start, end)`."""
        return self.load(self.indices[start:end])


class Collate:
    """Makes a batch `(inputs, targets)` of samples.

    A sample, or what the function makes of samples, is a tuple `(inputs, targets)`, a dict, or an object
    with attributes. Without keys a tuple has two parts, and all else is both inputs and targets.

    Args:
        function: makes a batch of a list of samples, as `collate_fn` of torch's `DataLoader`.
        inputs: key or keys of what the model gets (`hetexp.core.config.samples.SampleKeys`).
        targets: key or keys of what the loss gets.
        ignored: labels that do not count in the loss, of which padding is made; none: -100.
    """

    def __init__(
        self,
        function: Function = default_collate,
        inputs: _Keys = None,
        targets: _Keys = None,
        ignored: Sequence[int] = (),
    ) -> None:
        self.function, self.inputs, self.targets = function, inputs, targets
        self.stacks = function is default_collate
        """Whether torch's `default_collate` makes the batch."""
        self.has_rows = self.stacks or isinstance(function, Pad)
        """Whether every tensor of a batch has a row a sample, so that batches may be cut."""
        self.has_keys = inputs is not None or targets is not None
        self.is_own = not self.has_rows and function is not collate_list
        """Whether the user's own code makes the batch, which may draw random numbers."""
        if isinstance(function, Pad):
            function.targets |= set(map(str, _listed(targets)))
            function.ignored = ignored or function.ignored

    @property
    def one_shape(self) -> bool | None:
        """Whether all batches of one size have one shape, `None` if the samples decide it."""
        if isinstance(self.function, Pad):
            return self.function.length is not None
        return self.function is not collate_list and (self.stacks or None)

    def __call__(self, samples: list[Any], stacked: Function | None = None) -> tuple[Any, Any]:
        """Return the batch of some samples.

        Args:
            stacked: called in place of `default_collate`, if that is the function.

        Raises:
            ConfigError: a shipped function cannot make a batch of them, or a key is none of theirs.
        """
        return self.pair(_made(self.function, samples, "data.collate", stacked))

    def load(self, dataset: Dataset[Any], indices: Sequence[int]) -> tuple[Any, Any]:
        """Return the batch of some samples of a data set, on the host."""
        pair = self(read(dataset, indices))
        return pair if self.has_rows else self.with_indices(pair, indices, dataset)

    def with_indices(
        self, pair: tuple[Any, Any], indices: Sequence[int], dataset: Dataset[Any]
    ) -> Microbatch:
        """Return a batch that may be cut; its parts are read again."""
        return Microbatch.of(pair, indices, functools.partial(self.load, dataset))  # type: ignore[arg-type]

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """Return `(inputs, targets)` of a batch.

        Raises:
            ConfigError: a key is none of the batch's, or its parts are not two.
        """
        if isinstance(batch, Mapping) and not isinstance(batch, dict):
            batch = dict(batch)  # a model gets only a dict as keyword arguments
        if self.has_keys:
            return self._by_key(batch)
        if type(batch) not in (tuple, list) and not hasattr(batch, "_fields"):
            return batch, batch
        if len(batch) == 2:
            return batch[0], batch[1]
        if len(batch) == 1:
            return batch[0], batch[0]
        accepted = f"the position of the targets in samples of {len(batch)} parts"
        fix = "For example data.inputs=[0,1] data.targets=2: the model gets a tuple of the parts [0,1]."
        raise ConfigError(must_be("data.targets", accepted, None, fix))

    def _by_key(self, batch: Any) -> tuple[Any, Any]:
        taken = {*_listed(self.inputs), *_listed(self.targets)}
        rest = functools.partial(_rest, batch, taken)
        inputs = rest() if self.inputs is None else _parts("data.inputs", batch, self.inputs)
        targets = rest() if self.targets is None else _parts("data.targets", batch, self.targets)
        if self.inputs is None and isinstance(batch, dict):
            inputs = {key: value for key, value in batch.items() if key not in taken}
        return inputs, targets


class Explained:
    """A function that makes a batch in a loop of the user's own, whose errors are those of `Collate`.

    Args:
        function: as `collate_fn` of torch's `DataLoader`; its batch is given as it is.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.stacks = function is default_collate
        self._pads_unseen = isinstance(function, Pad) and not function.has_mask

    def __call__(self, samples: list[Any], stacked: Function | None = None) -> Any:
        """Return the batch of some samples; see `Collate`. Warn once of padding that no mask shows.

        Raises:
            ConfigError: a shipped function cannot make a batch of them.
        """
        if self._pads_unseen and _mismatch(samples) is not None:
            self._pads_unseen = False
            warnings.warn(
                "collate='pad' makes no mask, so that the model takes padding for data. With dicts as "
                "samples, collate={'_target_': 'pad', 'mask': 'attention_mask'} adds one.",
                stacklevel=2,
            )
        return _made(self.function, samples, "collate", stacked)


def stacks(collate: Function) -> bool:
    """Return whether torch's `default_collate` makes the batch."""
    return collate.stacks if isinstance(collate, (Collate, Explained)) else collate is default_collate


def _made(function: Function, samples: list[Any], key: str, stacked: Function | None = None) -> Any:
    """Return a function's batch.

    Args:
        key: of the function, for messages.
        stacked: called in place of `default_collate`, if that is the function.

    Raises:
        ConfigError: a shipped function cannot make a batch of these samples.
    """
    try:
        return (stacked if stacked is not None and function is default_collate else function)(samples)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
        if problem := _problem(function, samples, key):
            raise ConfigError(problem) from error
        raise


def _problem(function: Function, samples: list[Any], key: str) -> str:
    """Return why samples do not stack; empty for a user's own function, whose error says it."""
    if function is not default_collate and not isinstance(function, Pad):
        return ""
    found = _mismatch(samples)
    if found is None:
        return ""
    name, first, other = found
    if other is None:
        fix = "+data.transform={_target_: torchvision.transforms.ToTensor}), or write data.collate=list."
        if key == "collate":
            fix = 'transform=torchvision.transforms.ToTensor()), or set collate="list".'
        return (
            f"A sample's {name} must be tensors, NumPy arrays, numbers or text, but are {first} instead. "
            f"Give the data a transform that makes a tensor of it (torchvision: {fix}"
        )
    if isinstance(function, Pad):
        needs = f"needs samples whose {name} differ in the first dimension only"
        return f"`{key}` pad {needs}, but they are {first} and {other}."
    return must_be(
        key,
        "pad, list or a function of your own if samples differ in shape",
        None,
        f"Of two samples the {name} are {first} and {other}.",
    )


def read(dataset: Dataset[Any], indices: Sequence[int]) -> list[Any]:
    """Return some samples of a data set, at once if it offers that."""
    many = getattr(dataset, "__getitems__", None)
    return many(list(indices)) if many else [dataset[index] for index in indices]


def build_collate(keys: Mapping[str, Any], ignored: Sequence[int] = ()) -> Collate:
    """Return the object of the values of hetexp's own keys in the section `data`.

    Args:
        ignored: labels that do not count in the loss; none: -100.

    Raises:
        ConfigError: `data.collate` builds nothing that can be called.
    """
    function = build_function(keys.get("collate"))
    return Collate(function, keys.get("inputs"), keys.get("targets"), ignored)


def build_function(node: str | Mapping[str, Any] | None) -> Function:
    """Return the function that `data.collate` names.

    A class is built, also by its path alone. A function gets the arguments with each list of samples, unless
    it takes nothing more than these: then it returns the function.

    Raises:
        ConfigError: the node builds nothing that can be called.
    """
    if node is None:
        return default_collate
    if isinstance(node, str):
        node = {"_target_": node}
    target = COLLATE.get(node["_target_"], node["_target_"])
    found = locate(target, "data.collate")
    arguments = {name: value for name, value in node.items() if name != "_target_"}
    if not arguments and not inspect.isclass(found):
        function = found
    else:
        partial = {} if inspect.isclass(found) or _is_complete(found, arguments) else {"_partial_": True}
        function = instantiate({"_target_": target, **arguments, **partial})
    if not callable(function):
        raise ConfigError(must_be("data.collate", "a function or a class whose objects are called", target))
    return function  # type: ignore[no-any-return]


def _is_complete(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether a function can be called with these arguments alone."""
    try:
        inspect.signature(function).bind(**{k: v for k, v in arguments.items() if not k.startswith("_")})
    except (TypeError, ValueError):
        return False
    return True


def _listed(keys: _Keys) -> list[Key]:
    return [] if keys is None else keys if isinstance(keys, list) else [keys]


def _parts(name: str, batch: Any, keys: Key | list[Key]) -> Any:
    """Return the part of a single key, a dict of the parts of names, or a tuple of those of positions."""
    if not isinstance(keys, list):
        return _part(name, batch, keys)
    if all(isinstance(key, int) for key in keys):
        return tuple(_part(name, batch, key) for key in keys)
    return {key: _part(name, batch, key) for key in keys}


def _part(name: str, batch: Any, key: Key) -> Any:
    if isinstance(batch, dict):
        if key in batch:
            return batch[key]
        known = ", ".join(map(str, batch))
        hint = did_you_mean(str(key), map(str, batch)).strip()
        raise ConfigError(must_be(name, f"a key of the samples ({known})", key, hint))
    if isinstance(batch, (tuple, list)) and not isinstance(key, str):
        if key < len(batch):
            return batch[key]
        raise ConfigError(must_be(name, f"the position of one of the {len(batch)} parts of a sample", key))
    if isinstance(key, str) and hasattr(batch, key):
        return getattr(batch, key)
    kind = type(batch)
    if isinstance(batch, (tuple, list)):
        accepted = f"a position from 0 to {len(batch) - 1}, as samples are tuples"
    else:
        accepted = f"an attribute of the batch, a {kind.__module__}.{kind.__qualname__}"
    raise ConfigError(must_be(name, accepted, key))


def _rest(batch: Any, taken: set[Key]) -> Any:
    """Return what no key takes: a single part itself, several as they come; a whole object."""
    if isinstance(batch, dict):
        left = {key: value for key, value in batch.items() if key not in taken}
        return next(iter(left.values())) if len(left) == 1 else left
    if isinstance(batch, (tuple, list)):
        others = tuple(part for position, part in enumerate(batch) if position not in taken)
        return others[0] if len(others) == 1 else others
    return batch


def _mismatch(samples: list[Any], name: str = "values") -> tuple[str, str, str | None] | None:
    """Return the name of the first part in which samples do not stack, with the shapes or types of two.

    The second one is missing for a part that no batch can hold.
    """
    first = samples[0]
    for other in samples[1:]:
        if isinstance(first, Mapping) and isinstance(other, Mapping) and first.keys() != other.keys():
            return "keys", f"({', '.join(map(str, first))})", f"({', '.join(map(str, other))})"
    if isinstance(first, Mapping):
        columns = {f"`{key}`": [sample[key] for sample in samples] for key in first}
        return next((m for key, column in columns.items() if (m := _mismatch(column, key))), None)
    if isinstance(first, tuple):
        parts = {0: "inputs", 1: "targets"} if name == "values" and len(first) == 2 else {}
        for position in range(min(len(sample) for sample in samples)):
            column = [sample[position] for sample in samples]
            if found := _mismatch(column, parts.get(position, f"part {position}")):
                return found
        return None
    shapes = [describe(sample) for sample in samples]
    for sample, shape in zip(samples, shapes, strict=True):
        if not _stackable(sample):
            return name, shape, None
    return next(((name, shapes[0], shape) for shape in shapes if shape != shapes[0]), None)


def _stackable(value: Any) -> bool:
    kind = type(value)
    numeric = isinstance(value, (torch.Tensor, int, float, str, bytes, list)) or kind.__module__ == "numpy"
    return numeric


def describe(value: Any) -> str:
    """Return the shape and type of a value, for messages: "[3, 8] float32", "a list of 5", "a PIL.Image"."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if type(value).__module__ == "numpy" and hasattr(value, "shape"):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list) and value and isinstance(value[0], (int, float, str)):
        return f"a list of {len(value)}"
    if isinstance(value, (tuple, list)):
        shown = ", ".join(map(describe, value[:3])) + (", …" if len(value) > 3 else "")
        return f"({shown})" if isinstance(value, tuple) else f"[{shown}]"
    if isinstance(value, (int, float, str, bool)):
        return type(value).__name__
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}"

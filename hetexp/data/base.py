"""The interface of a data source, and how the configuration becomes a data source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import instantiate

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class DataSource(Protocol):
    """Training and evaluation data of a run, the same on every rank."""

    train: Dataset[Any]
    """Map-style: `len` and `__getitem__`, which gives `(input, target)` as tensors of one sample.

    `__getitems__`, if there is one, gives a list of samples at once. A class whose samples draw no random
    numbers of torch, NumPy or Python, and may be read by two threads at a time, says so by
    `prefetchable = True`: then a thread loads them while the step computes (`hetexp.data.loader`).
    One whose samples depend in shape on those that they are asked for with has a method `same_shape`, which
    gives the same samples in the shape of the largest of training and evaluation (`hetexp.data.padded`).
    """
    evaluation: Dataset[Any] | None
    """Like `train`; `None` if there is nothing to evaluate on."""
    facts: Mapping[str, Any]
    """Model arguments that the data decides, such as `{"input_shape": [1, 8, 8], "num_classes": 10}`."""


@dataclass
class _Parts:
    """A data source made of the parts that a user's own class offers."""

    train: Dataset[Any]
    evaluation: Dataset[Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: Any = None
    """`hetexp.data.activations.Source`, if it has one."""


def build_data(node: Mapping[str, Any]) -> DataSource:
    """Build the data source that the `data` section describes.

    A plain map-style dataset is training data without evaluation; its `facts` are used if it has any.

    Args:
        node: the section, with `_target_`.

    Raises:
        ConfigError: what was built is neither a data source nor a map-style dataset.
    """
    built = instantiate(node)
    facts = getattr(built, "facts", {})
    # Many published datasets have a flag named `train`: only data under that name makes a source.
    if _is_map_style(getattr(built, "train", None)):
        evaluation = getattr(built, "evaluation", None)
        if evaluation is not None and not _is_map_style(evaluation):
            raise ConfigError(_wrong_kind("map-style evaluation data or none", evaluation))
        return _Parts(built.train, evaluation, facts, getattr(built, "source", None))
    if _is_map_style(built):
        return _Parts(built, None, facts)
    accepted = "a data source or a map-style dataset (`__len__` and `__getitem__`)"
    raise ConfigError(_wrong_kind(accepted, built))


def same_shape(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return data whose samples all have one shape, if those of this may differ; else this.

    Stages send each other tensors of fixed size; a memory estimate is of the largest sample, and emulated
    devices count one for all.
    """
    tell = getattr(dataset, "same_shape", None)
    uniform: Dataset[Any] = tell() if callable(tell) else dataset
    return uniform


def _is_map_style(value: Any) -> bool:
    # Asked of the class, which is where Python looks `len()` and `[]` up.
    sized = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return sized and not isinstance(value, (str, bytes, Mapping))


def _wrong_kind(accepted: str, value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"`data._target_` must build {accepted}, but builds a {kind} instead."

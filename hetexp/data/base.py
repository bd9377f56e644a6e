"""The interface of a data source, and the function that builds a data source from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hetexp.core.errors import ConfigError, must_build
from hetexp.core.instantiate import instantiate

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class DataSource(Protocol):
    """Training and evaluation data of a run, the same on every rank."""

    train: Dataset[Any]
    """Map-style: `len` and `__getitem__`, which returns `(input, target)` as tensors of one sample.

    An optional method `__getitems__` returns a list of samples. A class may set `prefetchable = True` if its
    samples draw no random numbers of torch, NumPy or Python and two threads may read them at a time: then a
    thread loads them while the step computes (`hetexp.data.loader`). If the shape of samples depends on the
    other samples of a call, a method `same_shape` returns the same samples in the shape of the largest one of
    training and evaluation (`hetexp.data.padded`).
    """
    evaluation: Dataset[Any] | None
    """Data like `train`; `None`: no evaluation."""
    facts: Mapping[str, Any]
    """Model arguments that the data determines, such as `{"input_shape": [1, 8, 8], "num_classes": 10}`."""


@dataclass
class _Parts:
    """A data source made of the attributes of a user's class."""

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
        ConfigError: `_target_` builds neither a data source nor a map-style dataset.
    """
    built = instantiate(node)
    facts = getattr(built, "facts", {})
    # Many published datasets have a flag named `train`: only data under that name makes a source.
    if _is_map_style(getattr(built, "train", None)):
        evaluation = getattr(built, "evaluation", None)
        if evaluation is not None and not _is_map_style(evaluation):
            accepted = "map-style evaluation data or none"
            raise ConfigError(must_build("data._target_", accepted, evaluation))
        return _Parts(built.train, evaluation, facts, getattr(built, "source", None))
    if _is_map_style(built):
        return _Parts(built, None, facts)
    accepted = "a data source or a map-style dataset (`__len__` and `__getitem__`)"
    raise ConfigError(must_build("data._target_", accepted, built))


def same_shape(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return the data with samples of one shape; `dataset` itself unless it has a method `same_shape`.

    Stages send each other tensors of fixed size, a memory estimate needs the largest sample, and emulated
    devices count the work of one sample for all.
    """
    method = getattr(dataset, "same_shape", None)
    uniform: Dataset[Any] = method() if callable(method) else dataset
    return uniform


def _is_map_style(value: Any) -> bool:
    # Attributes of the class, as for Python's `len()` and `[]`.
    sized = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return sized and not isinstance(value, (str, bytes, Mapping))

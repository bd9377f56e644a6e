"""The interface of a data source, and the function that builds a data source from the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hetexp.core.config import COLLATE, SampleKeys, own_arguments, sample_keys, validated
from hetexp.core.errors import ConfigError, must_be, must_build
from hetexp.core.instantiate import check_component, instantiate, locate, parameters

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from hetexp.data.samples import Collate
    from hetexp.data.streams.stream import Stream

EVALUATION_SPLITS = ("validation", "evaluation", "eval", "val", "test")
"""Names of evaluation data among several data sets, in the order in which they are looked for."""


class DataSource(Protocol):
    """Training and evaluation data of a run, the same on every rank."""

    train: Dataset[Any]
    """Map-style: `len` and `__getitem__`, which returns `(input, target)` as tensors of one sample.

    An optional method `__getitems__` returns a list of samples. A class may set `prefetchable = True` if its
    samples draw no random numbers of torch, NumPy or Python and two threads may read them at a time: then a
    thread loads them while the step computes (`hetexp.data.loader`). If the shape of samples depends on the
    other samples of a call, a method `same_shape` returns the same samples in the shape of the largest one of
    training and evaluation (`hetexp.data.padded`). A stream (`torch.utils.data.IterableDataset`, or another
    class with `__iter__`) is wrapped: `hetexp.data.streams.stream.Stream`.
    """
    evaluation: Dataset[Any] | None
    """Data like `train`; `None`: no evaluation."""
    facts: Mapping[str, Any]
    """Model arguments that the data determines, such as `{"input_shape": [1, 8, 8], "num_classes": 10}`."""


@dataclass
class Data:
    """The data of the section `data`, as all of hetexp uses them."""

    train: Dataset[Any]
    evaluation: Dataset[Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: Any = None
    """`hetexp.data.activations.Source`, if it has one."""
    collate: Collate = field(kw_only=True)
    """Makes batches `(inputs, targets)` of samples of `train` and `evaluation`."""


def build_data(node: Mapping[str, Any], ignored: Sequence[int] = ()) -> Data:
    """Build the data that the `data` section describes.

    A plain data set is training data without evaluation; its `facts` are used if it has any. So is a mapping
    with `train`, as `datasets.load_dataset` gives, whose other splits may be evaluation data.

    Args:
        node: the section, with `_target_`.
        ignored: labels that do not count in the loss (`LossConfig.ignored`).

    Raises:
        ConfigError: `_target_` builds neither a data source nor a data set.
    """
    import torch

    from hetexp.data.samples import build_collate

    # Before the user's class runs, which may seed it: `trainer.seed`, as whoever builds data has seeded it.
    seed = torch.initial_seed()
    named = parameters(node["_target_"])
    keys = sample_keys(node, named)
    built = _instantiated(own_arguments("data", node, named))
    facts = getattr(built, "facts", {})
    source = None
    # Many published datasets have a flag named `train`: only data under that name makes a source.
    if as_data(getattr(built, "train", None)) is not None:
        train, evaluation, source = (
            built.train,
            getattr(built, "evaluation", None),
            getattr(built, "source", None),
        )
    elif isinstance(built, Mapping) and as_data(built.get("train")) is not None:
        splits = [built[name] for name in EVALUATION_SPLITS if name in built]
        train, evaluation = built["train"], next(iter(splits), None)
    elif as_data(built) is not None:
        train, evaluation = built, None
    else:
        raise ConfigError(_no_data(built))
    if evaluation is not None and as_data(evaluation) is None:
        accepted = "evaluation data that is a data set or a stream, or none"
        raise ConfigError(must_build("data._target_", accepted, evaluation))
    wanted = keys.get("evaluation")
    train, evaluation = as_data(in_torch(train)), as_data(in_torch(evaluation))
    assert train is not None, "as checked"
    train, evaluation = _with_evaluation(train, evaluation, wanted, seed)
    return Data(train, evaluation, facts, source, collate=build_collate(keys, ignored))


def _instantiated(node: Mapping[str, Any]) -> Any:
    """Return what a node builds; of a generator function, a stream that calls it for each pass."""
    from hetexp.data.streams.stream import Generated

    if not inspect.isgeneratorfunction(locate(node["_target_"])):
        return instantiate(node)
    return Generated(instantiate({**node, "_partial_": True}))


def _with_evaluation(
    train: Dataset[Any], evaluation: Dataset[Any] | None, wanted: float | Mapping[str, Any] | None, seed: int
) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Return training and evaluation data as `data.evaluation` asks for.

    Raises:
        ConfigError: it asks for a part of training data that have evaluation data, or builds none.
    """
    if wanted is None:
        return train, evaluation
    if isinstance(wanted, Mapping):
        built = in_torch(_instantiated(wanted))
        evaluation = as_data(built)
        if evaluation is None:
            raise ConfigError(must_build("data.evaluation._target_", "a data set or a stream", built))
        return train, evaluation
    if evaluation is not None:
        raise ConfigError(must_be("data.evaluation", "null if the data has evaluation data itself", wanted))
    if stream_of(train) is not None:
        accepted = "null or evaluation data of its own if `data` is a stream, of which no part can be drawn"
        raise ConfigError(must_be("data.evaluation", accepted, wanted))
    from torch.utils.data import Subset

    from hetexp.data.sampler import random_order

    total = len(train)  # type: ignore[arg-type]  # map-style, as checked
    count = round(total * wanted)
    if not 0 < count < total:
        accepted = f"such that both parts of the {total} samples have one"
        raise ConfigError(must_be("data.evaluation", accepted, wanted))
    order = random_order(seed, (0, 2), total)  # no epoch and no partition has this key
    return Subset(train, sorted(order[count:].tolist())), Subset(train, sorted(order[:count].tolist()))


def in_torch(dataset: Any) -> Any:
    """Return a data set of Hugging Face's `datasets` with tensors as its columns, any other as it is.

    A format that the user has chosen stays.
    """
    kind = type(dataset)
    is_theirs = kind.__module__.partition(".")[0] == "datasets" and hasattr(kind, "with_format")
    if not is_theirs:
        return dataset
    chosen = getattr(dataset, "_formatting", None)  # of a stream, which has no `format`
    if hasattr(dataset, "format"):
        chosen = dataset.format["type"]
    return dataset if chosen is not None else dataset.with_format("torch")


def check_samples(node: Mapping[str, Any]) -> list[str]:
    """Return the problems of hetexp's own keys in the section `data`, whose class was found."""
    keys = sample_keys(node, parameters(node["_target_"]))
    typed, problems = validated(SampleKeys, keys, "data")
    if typed is None:
        return problems
    if isinstance(typed.collate, str):
        problems += _check_collate({"_target_": typed.collate}, "data.collate")
    elif typed.collate is not None:
        problems += _check_collate(typed.collate, "data.collate._target_")
    if isinstance(typed.evaluation, Mapping):
        problems += check_component("data.evaluation", typed.evaluation)
    return problems


def _check_collate(node: Mapping[str, Any], key: str) -> list[str]:
    if not isinstance(node.get("_target_"), str):
        return check_component("data.collate", node)
    target = COLLATE.get(node["_target_"], node["_target_"])
    try:
        found = locate(target)
    except Exception as error:  # an import runs any code and so raises anything
        accepted = f"{', '.join(COLLATE)} or the dotted path of a function or class"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [must_be(key, accepted, node["_target_"], f"{reason}.")]
    # A function gets the samples, too, when it is called.
    partial = {} if inspect.isclass(found) else {"_partial_": True}
    return check_component("data.collate", {**node, "_target_": target, **partial})


def as_data(value: Any) -> Dataset[Any] | None:
    """Return a data set as the loader reads it, a stream wrapped as such; `None` if the value is neither."""
    from hetexp.data.streams.stream import Stream, is_stream

    if isinstance(value, Stream):
        return value
    if is_stream(value):
        return Stream(value)
    data: Dataset[Any] | None = value if _is_map_style(value) else None
    return data


def stream_of(dataset: Dataset[Any] | None) -> Stream | None:
    """Return the data if it is a stream; else its samples have a number and an index each."""
    from hetexp.data.streams.stream import Stream

    return dataset if isinstance(dataset, Stream) else None


def size_of(dataset: Dataset[Any]) -> int | None:
    """Return the number of samples; `None` for a stream of unknown length."""
    stream = stream_of(dataset)
    return len(dataset) if stream is None else stream.length  # type: ignore[arg-type]


def indexed(dataset: Dataset[Any], count: int) -> Dataset[Any]:
    """Return data whose first samples have indices: a data set itself, or `count` samples of a stream."""
    stream = stream_of(dataset)
    return dataset if stream is None else stream.first(count)  # type: ignore[return-value]  # a list has indices


def same_shape(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return the data with samples of one shape; `dataset` itself unless it has a method `same_shape`.

    Stages send each other tensors of fixed size, a memory estimate needs the largest sample, and emulated
    devices count the work of one sample for all.
    """
    method = getattr(dataset, "same_shape", None)
    uniform: Dataset[Any] = method() if callable(method) else dataset
    return uniform


def _no_data(built: Any) -> str:
    """Return why what `data._target_` builds is no data."""
    if isinstance(built, Mapping) and built:
        names = ", ".join(map(str, built))
        fix = "Choose one with +data.split=… if the class takes it."
        return f"`data._target_` must build data with a split `train`, but its splits are {names}. {fix}"
    accepted = "a data source, a data set (`__len__` and `__getitem__`) or a stream (`IterableDataset`)"
    return must_build("data._target_", accepted, built)


def _is_map_style(value: Any) -> bool:
    # Attributes of the class, as for Python's `len()` and `[]`.
    sized = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return sized and not isinstance(value, (str, bytes, Mapping))

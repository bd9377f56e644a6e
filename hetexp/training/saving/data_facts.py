"""Compares the contents of data by a few samples: between ranks, and between a run and its checkpoint.

Integers, texts and shapes are compared by a hash, floating-point numbers and images by three sums: processors
and libraries of different machines may differ in the last bits of the same sample.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from hetexp.core.errors import logged
from hetexp.data.base import stream_of
from hetexp.training.seeding import seeded

PLACES = 5
"""Samples that are read: the first, the last, and some between them."""
TOLERANCE = 1e-3
"""Largest difference of two sums, ÷ the mean magnitude, between two readings of one sample."""
_SEED = 0
"""Of samples that draw random numbers; not `trainer.seed`, since a resumed run may have another one."""
FIX = (
    "Samples must be the same on every rank: give a generator of your own a seed, sort what a folder lists, "
    "and check that all machines have the same files."
)


def contents(data: Any) -> dict[str, Any]:
    """Return what distinguishes the contents of a data set, as plain JSON types by sample.

    A sample that is not the same when it is read again with the same seed, or that cannot be read, is left
    out. Random states stay as they are.
    """
    # Of a stream each batch is compared.
    if data is None or stream_of(data) is not None or not hasattr(type(data), "__getitem__"):
        return {}
    last = len(data) - 1
    places = sorted({round(last * part / (PLACES - 1)) for part in range(PLACES)}) if last >= 0 else []
    found: dict[str, Any] = {}
    for index in places:
        with logged(f"sample {index} of the data cannot be compared with a checkpoint's"):
            first, second = _read(data, index), _read(data, index)
            if not _differ(first, second):
                found[str(index)] = first
    return found


def differing_samples(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[int]:
    """Return the samples that differ between two results of `contents`; those of one alone do not count."""
    return sorted(int(i) for i in one.keys() & other.keys() if _differ(one[i], other[i]))


def contents_problems(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return a sentence for each data set whose contents differ between ranks.

    Args:
        facts: each rank's `contents` of each data set by its name.
        names: of the ranks.
    """
    problems = []
    for data in facts[0] if facts else ():
        for name, fact in zip(names[1:], facts[1:], strict=True):
            if differing := differing_samples(facts[0][data], fact.get(data, {})):
                where = f"is another one on {name} than on {names[0]}"
                problems.append(f"sample {differing[0]} of the {data} data {where}. {FIX}")
                break
    return problems


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what is not as in a checkpoint's run: of the training data, and of the evaluation data."""
    changed: dict[str, list[str]] = {}
    for data in ("training", "evaluation"):
        before, after = (facts.get(f"{data}_samples") for facts in (saved, now))
        parts = [f"{after} samples instead of {before}"] if before != after else []
        contents_before, contents_now = (facts.get("contents", {}).get(data, {}) for facts in (saved, now))
        if not parts and (differing := differing_samples(contents_before, contents_now)):
            parts.append(f"another sample {differing[0]}")
        changed[data] = parts
    if not changed["training"] and saved.get("sample_order") != now.get("sample_order"):
        changed["training"].append("another order of the samples")
    return changed["training"], changed["evaluation"]


def _read(data: Any, index: int) -> list[Any]:
    """Return a sample's hash, and the sums of its arrays of numbers."""
    digest, sums = hashlib.sha256(), []
    with seeded(_SEED):
        sample = data[index]
    for part in _parts(sample):
        if isinstance(part, np.ndarray):
            sums.append(_sums(part))
        else:
            digest.update(part)
    return [digest.hexdigest()[:16], sums]


def _parts(value: Any) -> Iterator[bytes | np.ndarray[Any, Any]]:
    """Yield a nested sample as arrays to be summed, and as bytes to be hashed."""
    if isinstance(value, torch.Tensor):
        yield from _array(_plain(value.detach()))
    elif isinstance(value, (np.ndarray, np.generic)):
        yield from _array(np.asarray(value))
    elif isinstance(value, float):
        yield np.asarray(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"{len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif value is None or isinstance(value, (bool, int, str, bytes)):
        yield repr(value).encode("utf-8", "surrogatepass")
    elif is_dataclass(value):
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif callable(getattr(value, "tobytes", None)):  # such as an image of PIL
        yield from _array(np.frombuffer(value.tobytes(), dtype=np.uint8))
    else:
        yield type(value).__qualname__.encode()


def _plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    known: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype in _NARROW else tensor).numpy()
    return known


_NARROW = (torch.bfloat16, *(getattr(torch, name) for name in dir(torch) if name.startswith("float8")))
"""Types that NumPy does not have."""


def _array(array: np.ndarray[Any, Any]) -> Iterator[bytes | np.ndarray[Any, Any]]:
    yield f"{array.shape}".encode()
    if array.dtype.kind in "fc" or array.dtype == np.uint8:
        yield array
    elif array.dtype.kind in "biuSUMm":
        yield array.tobytes()
    else:
        yield array.dtype.str.encode()


def _sums(array: np.ndarray[Any, Any]) -> list[float]:
    """Return the mean, the mean × place, and the mean magnitude of an array."""
    values = array.reshape(-1)
    flat = np.concatenate([values.real, values.imag]) if values.dtype.kind == "c" else values
    flat = flat.astype(np.float64)
    if not flat.size:
        return [0.0, 0.0, 0.0]
    place = np.linspace(-1.0, 1.0, flat.size)
    return [float(flat.mean()), float((flat * place).mean()), float(np.abs(flat).mean())]


def _differ(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two readings are of different samples."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return True
    for first, second in zip(one[1], other[1], strict=True):
        scale = max(abs(first[2]), abs(second[2]))
        for a, b in zip(first, second, strict=True):
            same = a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= TOLERANCE * scale
            if not same:
                return True
    return False

"""Vectors in files, `*.npy` and `*.safetensors`, which are read on demand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

SUFFIXES = (".npy", ".safetensors")
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""NumPy has no bfloat16, whose bits are read as integers."""
_MOST_HEADER = 100_000_000
"""Bytes, as the library itself allows."""


@dataclass(frozen=True)
class Shard:
    """The rows of a file."""

    path: Path
    dtype: str
    """Type of NumPy, or `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the numbers in the file, in bytes."""
    fortran: bool = False

    def open(self) -> np.ndarray[Any, Any]:
        """Map the file into memory; rows that are not read take no memory."""
        kind = "<u2" if self.dtype == "bfloat16" else self.dtype
        order: Any = "F" if self.fortran else "C"
        return np.memmap(self.path, dtype=kind, mode="r", offset=self.offset, shape=self.shape, order=order)


def find_shards(folder: Path, prefix: str = "") -> tuple[list[Shard], list[str]]:
    """Return the shards of a folder in the order of their names, and their problems, one sentence each.

    Only headers are read.

    Args:
        prefix: beginning of the files' names.
    """
    shards: list[Shard] = []
    problems: list[str] = []
    named = (p for p in folder.iterdir() if p.suffix in SUFFIXES and p.name.startswith(prefix))
    for path in sorted(named, key=lambda path: path.name):
        try:
            shard = _read_npy(path) if path.suffix == ".npy" else _read_safetensors(path)
            _check(shard)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path.name} {error}")
            continue
        shards.append(shard)
    if shards:
        first = shards[0]
        for shard in shards[1:]:
            if shard.shape[1] != first.shape[1] or shard.dtype != first.dtype:
                problems.append(
                    f"{shard.path.name} holds vectors of {shard.shape[1]} {shard.dtype}, but "
                    f"{first.path.name} of {first.shape[1]} {first.dtype}"
                )
    return shards, problems


def _check(shard: Shard) -> None:
    if len(shard.shape) != 2 or not all(shard.shape):
        raise ValueError(f"holds an array of shape {list(shard.shape)}, and not [vectors, numbers]")
    size = 2 if shard.dtype == "bfloat16" else np.dtype(shard.dtype).itemsize
    needed = shard.offset + int(np.prod(shard.shape)) * size
    if shard.path.stat().st_size < needed:
        raise ValueError(f"is cut off: it has {shard.path.stat().st_size} bytes of {needed}")


def _read_npy(path: Path) -> Shard:
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            reader = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                reader = np.lib.format.read_array_header_2_0
            shape, fortran, dtype = reader(file)
        except ValueError as error:
            raise ValueError(f"is no array of NumPy: {error}") from error
        if dtype.kind != "f" or dtype.itemsize > 8:
            raise ValueError(f"holds {dtype}, and not float16, float32 or float64")
        return Shard(path, dtype.str, tuple(shape), file.tell(), bool(fortran))


def _read_safetensors(path: Path) -> Shard:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MOST_HEADER:
            raise ValueError("is no safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError("is no safetensors file") from error
    header.pop("__metadata__", None)
    names = ["activations"] if "activations" in header else list(header)
    if len(names) != 1:
        raise ValueError(f"must hold one tensor, or one named activations, but holds {sorted(names)[:5]}")
    facts = header[names[0]]
    if facts["dtype"] not in _TYPES:
        raise ValueError(f"holds {facts['dtype']}, and not one of {', '.join(_TYPES)}")
    dtype = "bfloat16" if facts["dtype"] == "BF16" else _TYPES[facts["dtype"]]
    return Shard(path, dtype, tuple(facts["shape"]), 8 + length + facts["data_offsets"][0])


class Rows:
    """Vectors of several shards, one after another, as float32, or float64 if they have that type.

    Args:
        shards: shards of one width and type.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = list(shards)
        self.ends = np.cumsum([shard.shape[0] for shard in shards])
        self._open: dict[int, np.ndarray[Any, Any]] = {}

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # each process maps the files by itself

    def read(self, places: Sequence[int]) -> torch.Tensor:
        """Return the vectors at these places, [len(places), width], in their order.

        Raises:
            IndexError: a place is outside of the data.
        """
        import torch

        indices = np.asarray(places, dtype=np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"place {indices.max()} of {len(self)} vectors")
        first = self.shards[0]
        half = first.dtype == "bfloat16"
        kind = np.dtype("<u2" if half else first.dtype)
        rows = np.empty((len(indices), first.shape[1]), dtype=kind)
        within = np.searchsorted(self.ends, indices, side="right")
        for number in np.unique(within).tolist():
            mask = within == number
            if number not in self._open:
                self._open[number] = self.shards[number].open()
            start = int(self.ends[number]) - self.shards[number].shape[0]
            rows[mask] = self._open[number][indices[mask] - start]
        if half:
            return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).float()
        return torch.from_numpy(rows.astype(np.float64 if kind.itemsize == 8 else np.float32, copy=False))

"""Activations of a model as vectors to be reconstructed, from files of the user or of `hetexp harvest`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hetexp.core.errors import ConfigError, must_be
from hetexp.data.base import DataSource
from hetexp.data.shards import SUFFIXES, Rows, Shard, find_shards

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

EVALUATION = "evaluation"
"""Names of files that begin so are evaluation data."""
SOURCE = "source.json"
"""File that names the checkpoint and the layer of the vectors."""
MEASURED_VECTORS = 65_536
"""Most vectors of the training data that the mean length is measured on."""


@dataclass(frozen=True)
class Source:
    """Origin of vectors, and the number of evaluation samples that judge their reconstruction."""

    path: Path
    """Path of `source.json`."""
    samples: int
    trusted: tuple[str, ...] = ()
    """Packages, beside hetexp, whose classes the source model may use."""


class Vectors:
    """A range of vectors, each its own target, multiplied by a factor.

    Args:
        first: place of the first vector.
        end: place after the last vector.
    """

    prefetchable = True

    def __init__(self, rows: Rows, first: int, end: int, factor: float = 1.0) -> None:
        self.rows, self.first, self.end, self.factor = rows, first, end, factor

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        if any(not 0 <= index < len(self) for index in indices):
            raise IndexError(f"place outside of {len(self)} vectors")
        vectors = self.rows.read([self.first + index for index in indices]) * self.factor
        return [(vector, vector) for vector in vectors]


class Activations(DataSource):
    """Every `*.npy` and `*.safetensors` of a folder, in the order of their names, mapped into memory.

    A file holds one array [vectors, width] of float16, bfloat16, float32 or float64, all of them of one width
    and type; a safetensors file one tensor, or one named `activations`. A sample is (vector, that vector).

    Args:
        folder: folder of `*.npy` and `*.safetensors` files, arrays [vectors, width]. Files whose names begin
            with `evaluation` are the evaluation data.
        test_fraction: part of the vectors, at the end, kept for evaluation if there are no such files.
        normalise: scale of the vectors. `mean_norm` multiplies all vectors by one number, so that their mean
            length is √width. This is usual for sparse autoencoders ("expected_average_only_in" of SAELens;
            Templeton et al. 2024).
        limit: most vectors for training, the first ones; `None`: all.
        loss_recovered: evaluation samples of the source model to judge reconstructions by; 0: none.
            Evaluations then compute how much of the model's loss is kept if the reconstruction replaces the
            activations. The folder must come from `hetexp harvest`.
        trust: packages whose code may run for the source model or its data; `None`: only classes of hetexp.

    Raises:
        ConfigError: the folder is missing, or its files hold no such vectors.
    """

    source: Source | None

    def __init__(
        self,
        folder: str,
        test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1,
        normalise: Literal["mean_norm", "none"] = "mean_norm",
        limit: PositiveInt | None = None,
        loss_recovered: NonNegativeInt = 0,
        trust: list[str] | None = None,
    ) -> None:
        training, evaluation, problems = _find(folder, loss_recovered)
        if problems:
            raise ConfigError(problems)
        rows = Rows(training)
        count = len(rows)
        num_test = 0 if evaluation else max(1, round(count * test_fraction))
        end = count - num_test if limit is None else min(limit, count - num_test)
        if end < 1:
            raise ConfigError(_too_few(folder, count))
        length, mean = _measure(rows, end)
        factor = math.sqrt(rows.shards[0].shape[1]) / length if normalise == "mean_norm" else 1.0
        self.train: Dataset[Any] = Vectors(rows, 0, end, factor)  # type: ignore[assignment]
        judged = Rows(evaluation) if evaluation else rows
        first = 0 if evaluation else count - num_test
        self.evaluation: Dataset[Any] | None = Vectors(judged, first, len(judged), factor)  # type: ignore[assignment]
        path = Path(folder).expanduser() / SOURCE
        self.source = Source(path, loss_recovered, tuple(trust or ())) if loss_recovered else None
        self.facts = {"input_size": len(mean), "mean": (mean * factor).tolist(), "scale": factor}

    @staticmethod
    def check(folder: str | None = None, loss_recovered: int = 0, **_: Any) -> list[str]:
        """Return the problems of the folder, one sentence each; only headers are read."""
        return _find(folder, loss_recovered)[2] if folder is not None else []


def _find(folder: str, loss_recovered: int) -> tuple[list[Shard], list[Shard], list[str]]:
    """Return shards to train on, shards to evaluate on, and their problems."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        fix = "`hetexp harvest` makes one."
        return [], [], [must_be("data.folder", "an existing folder", folder, fix)]
    shards, problems = find_shards(path)
    if problems:
        accepted = "a folder of arrays [vectors, width] of one width and type"
        return [], [], [must_be("data.folder", accepted, folder, f"{problem}.") for problem in problems]
    evaluation = [shard for shard in shards if shard.path.name.startswith(EVALUATION)]
    training = [shard for shard in shards if shard not in evaluation]
    if not training:
        accepted = f"a folder with at least one {' or '.join(SUFFIXES)} file to train on"
        return [], [], [must_be("data.folder", accepted, folder)]
    if loss_recovered and not (path / SOURCE).is_file():
        accepted = f"0 if `data.folder` has no {SOURCE} (`hetexp harvest` writes one)"
        return [], [], [must_be("data.loss_recovered", accepted, loss_recovered)]
    if not evaluation and sum(shard.shape[0] for shard in training) < 2:
        return [], [], [_too_few(folder, 1)]
    return training, evaluation, []


def _too_few(folder: str, count: int) -> str:
    fix = f"It holds {count}; a part of them is kept for evaluation."
    return must_be("data.folder", "a folder with enough vectors to train on", folder, fix)


def _measure(rows: Rows, end: int) -> tuple[float, torch.Tensor]:
    """Return mean length and mean [width] of vectors spread evenly over the training data."""
    import numpy as np
    import torch

    places = np.unique(np.linspace(0, end - 1, min(end, MEASURED_VECTORS)).astype(np.int64))
    length, total = 0.0, torch.zeros(rows.shards[0].shape[1], dtype=torch.float64)
    for start in range(0, len(places), 4096):
        vectors = rows.read(places[start : start + 4096].tolist()).double()
        length += float(vectors.norm(dim=1).sum())
        total += vectors.sum(dim=0)
    length /= len(places)
    if not math.isfinite(length) or length <= 0:
        accepted = "a folder of vectors of finite numbers that are not all 0"
        folder = str(rows.shards[0].path.parent)
        raise ConfigError(must_be("data.folder", accepted, folder, f"Their mean length is {length}."))
    return length, total / len(places)

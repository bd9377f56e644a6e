"""Synthetic data that can be learnt: fast, of any size, equal for a seed with every version of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveInt

from hetexp.data.base import DataSource

if TYPE_CHECKING:
    Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]

IGNORED = -100
"""Target that a loss ignores, as `torch.nn.CrossEntropyLoss` does by default."""
NOISE = 0.1
"""Chance of a random token, and standard deviation of a regression's noise."""


class Synthetic(DataSource):
    """Random samples of a task that `seed` draws.

    | kind | input | target |
    |---|---|---|
    | classification | float32 [*input_shape]: the mean of its class plus noise | int64 []: the class |
    | regression | float32 [*input_shape] | float32 [num_classes]: a linear map of the input plus noise |
    | tokens | int64 [sequence_length] | int64 [sequence_length]: the next token, or -100 if it is masked |

    Args:
        num_samples: size of the training data.
        num_test_samples: size of the evaluation data; 0: none. It does not change the training data.
        input_shape: shape of one input; tokens do not use it.
        num_classes: number of classes, or of a regression's targets.
        seed: seed of the task and of the samples.
        kind: kind of the task.
        vocab_size: number of different tokens.
        sequence_length: tokens of a sample.
        mask_fraction: expected part of the tokens without a target. It differs a lot between samples: many
            have nearly all of their targets or nearly none, but always one.
    """

    def __init__(
        self,
        num_samples: PositiveInt = 1024,
        num_test_samples: NonNegativeInt = 256,
        input_shape: Annotated[Sequence[PositiveInt], Field(min_length=1)] = (16,),
        num_classes: PositiveInt = 4,
        seed: NonNegativeInt = 0,
        kind: Literal["classification", "regression", "tokens"] = "classification",
        vocab_size: PositiveInt = 32,
        sequence_length: PositiveInt = 16,
        mask_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        import torch

        from hetexp.data.in_memory import InMemory

        rng = np.random.Generator(np.random.PCG64(seed))
        task: _Vectors | _Tokens
        if kind == "tokens":
            task = _Tokens(rng, vocab_size, sequence_length, mask_fraction)
            self.facts = {"vocab_size": vocab_size, "sequence_length": sequence_length}
        else:
            task = _Vectors(rng, tuple(input_shape), num_classes, kind)
            self.facts = {"input_shape": list(input_shape), "num_classes": num_classes}

        def dataset(count: int) -> InMemory:
            inputs, targets = task.sample(rng, count)
            return InMemory(torch.from_numpy(inputs), torch.from_numpy(targets))

        self.train = dataset(num_samples)
        self.evaluation = dataset(num_test_samples) if num_test_samples else None


class _Vectors:
    """Draws classes around means, or targets of a linear teacher."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...], num_outputs: int, kind: str) -> None:
        self.shape = shape
        self.kind = kind
        self.teacher = rng.standard_normal((num_outputs, *shape))

    def sample(self, rng: np.random.Generator, count: int) -> Arrays:
        inputs = rng.standard_normal((count, *self.shape))
        if self.kind == "classification":
            classes = rng.integers(len(self.teacher), size=count)
            return (inputs + self.teacher[classes]).astype(np.float32), classes.astype(np.int64)
        weights = self.teacher.reshape(len(self.teacher), -1)
        # Divided by the root of the fan-in: targets have variance 1 for any input size.
        clean = inputs.reshape(count, -1) @ weights.T / np.sqrt(weights.shape[1])
        targets = clean + NOISE * rng.standard_normal(clean.shape)
        return inputs.astype(np.float32), targets.astype(np.float32)


class _Tokens:
    """Draws tokens that are a fixed function of the one before, with random exceptions."""

    def __init__(self, rng: np.random.Generator, vocab_size: int, length: int, mask_fraction: float) -> None:
        self.length = length
        self.mask_fraction = mask_fraction
        self.following = rng.permutation(vocab_size)

    def sample(self, rng: np.random.Generator, count: int) -> Arrays:
        tokens = rng.integers(len(self.following), size=(count, self.length + 1), dtype=np.int64)
        random = rng.random((count, self.length)) < NOISE
        for place in range(self.length):
            predicted = self.following[tokens[:, place]]
            tokens[:, place + 1] = np.where(random[:, place], tokens[:, place + 1], predicted)
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if self.mask_fraction:
            targets[self._masked(rng, count)] = IGNORED
        return inputs, targets

    def _masked(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.bool_]:
        """Return which targets [count, length] to ignore; their number is U-shaped over samples."""
        fractions = rng.beta(self.mask_fraction, 1 - self.mask_fraction, size=count)
        numbers = np.minimum(np.rint(fractions * self.length), self.length - 1)
        ranks = rng.random((count, self.length)).argsort(axis=1).argsort(axis=1)
        masked: npt.NDArray[np.bool_] = ranks < numbers[:, None]
        return masked

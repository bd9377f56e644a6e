"""Chooses the samples of each step by the seed and the number of samples used so far, and by nothing else.

Step k of a run uses the same samples in the same order, whatever the devices, their shares or their number.
Every rank computes the global batch and takes its own part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetexp.core.errors import ConfigError, must_be

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """Position in the data, counted in samples so that it stays valid for another batch size or other ranks.

    Raises:
        ValueError: a number is negative.
    """

    epoch: int = 0
    """Epochs completed."""
    offset: int = 0
    """Samples of this epoch already used."""

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.offset < 0:
            raise ValueError(f"a position in the data must not be negative, but is {self}")

    def to_dict(self) -> dict[str, int]:
        """Return plain types for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, int]) -> Position:
        """Return the position that `to_dict` described."""
        return cls(epoch=int(raw["epoch"]), offset=int(raw["offset"]))


class GlobalSampler:
    """Cuts each epoch's random order of the training samples into global batches.

    Args:
        num_samples: size of the training data.
        global_batch_size: samples of one optimizer step, over all ranks.
        seed: decides the order of each epoch, with the epoch's number.
        drop_last: whether to drop the last samples of an epoch if they do not fill a batch.
        overfit_batches: if above 0, every epoch consists of so many first batches of epoch 0, in their order.

    Raises:
        ConfigError: there are no samples, or fewer than one batch with `drop_last`.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        seed: int,
        drop_last: bool = False,
        overfit_batches: int = 0,
    ) -> None:
        if num_samples < 1:
            raise ConfigError(f"`data` must hold at least one training sample, but holds {num_samples}.")
        if drop_last and num_samples < global_batch_size:
            accepted = f"at most the {num_samples} training samples where `trainer.drop_last` is true"
            raise ConfigError(must_be("trainer.global_batch_size", accepted, global_batch_size))
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.drop_last = drop_last
        self._same_order = overfit_batches > 0
        used = overfit_batches * global_batch_size if overfit_batches else num_samples
        self._epoch_size = min(num_samples, used)
        self._cached: tuple[int, Indices] | None = None

    drawn: tuple[float, float] | None = None
    """What ranks compare of the last batch of a stream (`hetexp.data.streams.stream`)."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of a whole epoch."""
        full, left = divmod(self._epoch_size, self.global_batch_size)
        return full if self.drop_last or not left else full + 1

    def steps_left(self, position: Position, epochs: int) -> int:
        """Return the number of batches from a position to the end of so many epochs."""
        here = self._batch_start(position)
        if here.epoch >= epochs:
            return 0
        full, left = divmod(self._epoch_size - here.offset, self.global_batch_size)
        in_this_epoch = full if self.drop_last or not left else full + 1
        return in_this_epoch + (epochs - here.epoch - 1) * self.steps_per_epoch

    def batch(self, position: Position) -> tuple[Indices, Position]:
        """Return the sample indices [batch] of the step at `position`, and the position of the next step.

        The last batch of an epoch may be short; offset 0 of the next epoch follows it. A position that was
        reached with another batch size continues at its sample. A position at or past the end of its epoch
        continues with the next epoch.
        """
        here = self._batch_start(position)
        end = min(here.offset + self.global_batch_size, self._epoch_size)
        # A copy, so that a change of the batch does not change the cached order.
        indices = self._order(0 if self._same_order else here.epoch)[here.offset : end].copy()
        return indices, self._batch_start(Position(here.epoch, end))

    def is_over(self, position: Position) -> bool:
        """Return whether no batch follows; false where the number of steps alone ends a run."""
        return False

    def fingerprint(self) -> str:
        """Return a short hash of epoch 0's order, which ranks compare before they train."""
        return hashlib.sha256(self._order(0).astype("<i8").tobytes()).hexdigest()[:16]

    def _batch_start(self, position: Position) -> Position:
        """Move a position without a batch left in its epoch to the start of the next epoch."""
        needed = self.global_batch_size if self.drop_last else 1
        if position.offset + needed > self._epoch_size:
            return Position(position.epoch + 1, 0)
        return position

    def _order(self, epoch: int) -> Indices:
        cached = self._cached  # the loader's thread may be about to replace it
        if cached is None or cached[0] != epoch:
            cached = self._cached = (epoch, random_order(self.seed, (epoch,), self.num_samples))
        return cached[1]


def random_order(seed: int, key: tuple[int, ...], count: int) -> Indices:
    """Return a random order, the same with every version of NumPy: ranks may run different ones.

    NumPy never changes the raw stream of a bit generator, but may change `Generator.permutation`. So the
    order is that of random sort keys.
    """
    source = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key))
    return np.argsort(source.random_raw(count), kind="stable").astype(np.int64)
